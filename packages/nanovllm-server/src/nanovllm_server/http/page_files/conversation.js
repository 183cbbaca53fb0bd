"use strict";

/* The turns of the conversation, and the buttons of a turn. */

const SHOWN_RESULT_MS = 1500;

/** The messages for the API, without the system prompt. */
let messages = [];
/** Aborts the running request; null if no request is running. */
let abortController = null;
/** Maps the element of a turn to the number of messages before the turn. */
const numEarlierMessages = new WeakMap();

/** Runs a function that extends the conversation. Scrolls to the new end if the old end was visible. */
function extendLog(extend) {
  const box = $("scroll");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  extend();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

/** Tells users of screen readers what has happened. */
function announce(text) {
  $("status").textContent = text;
}

function addTurn(role) {
  const author = role === "user" ? "You" : $("model").value;
  const turn = makeElement("article", `turn ${role}`);
  turn.setAttribute("aria-label", role === "user" ? "Your message" : `Answer of ${author}`);
  turn.append(makeElement("h2", "", author));
  numEarlierMessages.set(turn, messages.length);
  $("empty").hidden = true;
  extendLog(() => $("log").append(turn));
  return turn;
}

/** Removes a turn and all later turns, with their messages. */
function dropTurnsFrom(turn) {
  messages.length = numEarlierMessages.get(turn);
  while (turn.nextElementSibling) turn.nextElementSibling.remove();
  turn.remove();
}

function addError(turn, error) {
  const box = makeElement("div", "error", error.message);
  box.setAttribute("role", "alert");
  if (error.details?.length) box.append(makeElement("small", "", error.details.join(" · ")));
  extendLog(() => turn.append(box));
}

function makeButton(label, onClick) {
  const button = makeElement("button", label.toLowerCase(), label);
  button.type = "button";
  button.addEventListener("click", () => onClick(button));
  return button;
}

/** Adds buttons to a turn. callbacks: functions by label; each receives its button. */
function addActions(turn, callbacks) {
  const actions = makeElement("div", "actions");
  actions.setAttribute("role", "group");
  actions.setAttribute("aria-label", "Actions");
  actions.append(...Object.entries(callbacks).map(([label, onClick]) => makeButton(label, onClick)));
  extendLog(() => turn.append(actions));
}

/** Copies a text. Shows the result on the button for a moment. */
async function copyText(text, button) {
  const isCopied = navigator.clipboard ? await navigator.clipboard.writeText(text).then(() => true, () => false) : copyThroughSelection(text);
  const result = isCopied ? "Copied" : "Not copied";
  announce(result);
  button.textContent = result;
  button.focus();
  setTimeout(() => (button.textContent = "Copy"), SHOWN_RESULT_MS);
}

/** Copies a text without the clipboard API, which browsers lack on pages from another machine without HTTPS. */
function copyThroughSelection(text) {
  const field = makeElement("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

function sendMessage(text) {
  if (abortController || !text.trim()) return;
  // The conversation continues without the results of the tool calls.
  document.querySelectorAll(".results").forEach((button) => button.remove());
  addUserTurn(text);
  messages.push({ role: "user", content: text });
  $("scroll").scrollTop = $("scroll").scrollHeight;
  requestAnswer();
}

function addUserTurn(text) {
  const turn = addTurn("user");
  turn.append(makeElement("div", "text", text));
  addActions(turn, { Copy: (button) => copyText(text, button), Edit: () => editTurn(turn, text) });
}

/** Replaces the text of a user's turn by an input. Sending the changed text drops this turn and all later turns. */
function editTurn(turn, text) {
  const shown = [...turn.querySelectorAll(".text, .actions")];
  const form = makeElement("form", "edit-form");
  const field = makeElement("textarea");
  field.value = text;
  field.setAttribute("aria-label", "Edited message");
  const sendButton = makeElement("button", "main", "Send");
  const close = () => {
    form.remove();
    for (const element of shown) element.hidden = false;
    $("input").focus();
  };
  form.setAttribute("aria-label", "Edit the message");
  form.append(field, sendButton, makeButton("Cancel", close));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (abortController || !field.value.trim()) return;
    dropTurnsFrom(turn);
    sendMessage(field.value);
  });
  field.addEventListener("keydown", (event) => submitOnEnter(event, form));
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    // Escape ends only the editing, not a running answer.
    event.stopPropagation();
    close();
  });
  for (const element of shown) element.hidden = true;
  turn.append(form);
  field.focus();
}

/** Requests another answer in place of `turn`. */
function regenerate(turn) {
  if (abortController) return;
  dropTurnsFrom(turn);
  requestAnswer();
}

/** Submits a form on Enter. Shift+Enter makes a new line. */
function submitOnEnter(event, form) {
  // Enter also confirms a word in an input method; the message is not sent then.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!abortController) form.requestSubmit();
}

function submitOrStop() {
  if (abortController) return stopAnswer();
  const text = $("input").value;
  // Clear the input before the request: if the request fails, the message is put back into the input.
  $("input").value = "";
  sendMessage(text);
}

function stopAnswer() {
  abortController.abort();
  $("input").focus();
}

function clearConversation() {
  abortController?.abort();
  messages = [];
  $("log").replaceChildren();
  $("empty").hidden = false;
  $("input").focus();
}
