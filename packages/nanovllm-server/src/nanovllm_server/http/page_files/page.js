"use strict";

/* Connects the controls of the page. Runs last. */

function showSettings(isVisible) {
  $("settings").hidden = !isVisible;
  $("toggle").setAttribute("aria-expanded", String(isVisible));
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submitOrStop();
});
$("input").addEventListener("keydown", (event) => submitOnEnter(event, $("composer")));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && abortController) stopAnswer();
});
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY_STORAGE_NAME, $("key").value);
  $("key").setCustomValidity("");
  loadModels();
});
$("toggle").addEventListener("click", () => showSettings($("settings").hidden));
$("clear").addEventListener("click", clearConversation);
$("log").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copyText(button.closest(".code-block").querySelector("code").textContent, button);
});
for (const button of $("empty").querySelectorAll("button")) {
  button.addEventListener("click", () => sendMessage(button.textContent));
}

$("key").value = sessionStorage.getItem(KEY_STORAGE_NAME) ?? "";
showSettings(matchMedia("(min-width: 75rem)").matches);
loadModels();
pollMetrics();
