"use strict";

/* Requests an answer, and shows the answer while the server streams it. */

/** One answer on the page, while it is streamed. */
class AnswerView {
  constructor() {
    this.turn = addTurn("assistant");
    this.turn.classList.add("busy");
    this.message = { role: "assistant", content: null };
    this.calls = [];
    this.startTime = performance.now();
    this.content = this.reasoning = this.firstTokenTime = this.usage = this.finishReason = null;
    this.isReturned = false;
  }

  addChunk(chunk) {
    if (chunk.error) throw new ApiError(chunk.error);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices.find(({ index }) => index === 0);
    if (!choice) return;
    const { reasoning, content, tool_calls: calls } = choice.delta;
    if (reasoning) this.addReasoning(reasoning);
    if (content) this.addContent(content);
    if (calls) extendLog(() => calls.forEach((call) => this.addCall(call)));
    if (reasoning || content || calls) this.firstTokenTime ??= performance.now();
    this.finishReason = choice.finish_reason ?? this.finishReason;
  }

  addContent(text) {
    this.content ??= this.addMarkdown(this.turn);
    this.content.append(text);
    this.message.content = (this.message.content ?? "") + text;
  }

  addMarkdown(parent) {
    const element = makeElement("div", "text markdown");
    parent.append(element);
    return new MarkdownView(element, extendLog);
  }

  addReasoning(text) {
    if (this.reasoning === null) {
      const reasoningBox = makeElement("details");
      reasoningBox.append(makeElement("summary", "", "Reasoning"));
      this.turn.append(reasoningBox);
      this.reasoning = this.addMarkdown(reasoningBox);
    }
    this.reasoning.append(text);
    this.message.reasoning = (this.message.reasoning ?? "") + text;
  }

  addCall({ index, id, function: { name, arguments: text } }) {
    if (!this.calls[index]) {
      const box = makeElement("div", "call");
      const argumentsBox = makeElement("pre", "", "");
      box.append(makeElement("b", "", name), argumentsBox);
      this.turn.append(box);
      this.calls[index] = { box, argumentsBox };
      this.message.tool_calls ??= [];
      this.message.tool_calls[index] = { id, type: "function", function: { name, arguments: "" } };
    }
    this.calls[index].argumentsBox.append(text);
    this.message.tool_calls[index].function.arguments += text;
  }

  /** Ends the answer, and shows its finish reason, tokens and time. */
  complete(isStopped) {
    this.turn.classList.remove("busy");
    this.reasoning?.update();
    this.content?.update();
    const hasMessage = this.message.content !== null || this.message.reasoning || this.message.tool_calls;
    if (hasMessage) messages.push(this.message);
    else if (messages.at(-1).role === "user" && !$("input").value) this.returnMessage();
    this.showDetails(isStopped);
    if (!this.isReturned) this.addButtons();
    if (this.calls.length && !isStopped) this.askForResults();
  }

  /** The request failed: puts the message back into the input, where the user can change it and send it again. */
  returnMessage() {
    $("input").value = messages.pop().content;
    this.turn.previousElementSibling.querySelector(".actions").remove();
    this.isReturned = true;
  }

  addButtons() {
    const content = this.message.content;
    const copy = content === null ? {} : { Copy: (button) => copyText(content, button) };
    addActions(this.turn, { ...copy, Regenerate: () => regenerate(this.turn) });
  }

  showDetails(isStopped) {
    const seconds = (performance.now() - this.firstTokenTime) / 1000;
    const details = [isStopped ? "stopped" : this.finishReason];
    if (this.usage) {
      const tokens = this.usage.completion_tokens;
      details.push(`${tokens} tokens`, `first after ${formatDuration((this.firstTokenTime - this.startTime) / 1000)}`);
      if (tokens > 1 && seconds > 0) details.push(`then ${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (details[0]) extendLog(() => this.turn.append(makeElement("p", "note", details.join(" · "))));
  }

  /** Shows inputs in which the user enters the results of the tool calls. */
  askForResults() {
    const fields = this.calls.map(({ box }) => {
      const field = makeElement("textarea", "code");
      field.rows = 1;
      field.placeholder = "What the function returns";
      field.setAttribute("aria-label", "Result of the call");
      box.append(field);
      return field;
    });
    const button = makeElement("button", "results", fields.length > 1 ? "Send results" : "Send result");
    button.addEventListener("click", () => {
      if (abortController) return;
      this.message.tool_calls.forEach(({ id }, index) => {
        messages.push({ role: "tool", tool_call_id: id, content: fields[index].value });
        fields[index].disabled = true;
      });
      button.remove();
      requestAnswer();
    });
    extendLog(() => this.turn.append(button));
  }
}

/** Requests the model's answer to the conversation. */
async function requestAnswer() {
  const view = new AnswerView();
  abortController = new AbortController();
  const { signal } = abortController;
  $("send").textContent = "Stop";
  $("input").focus();
  announce("The model is answering.");
  $("log").setAttribute("aria-busy", "true");
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(buildRequest()), signal };
    const response = await callApi("v1/chat/completions", options);
    for await (const chunk of readEvents(response.body)) view.addChunk(chunk);
    announce("The answer is complete.");
  } catch (error) {
    announce(signal.aborted ? "The answer is stopped." : "");
    if (!signal.aborted) {
      addError(view.turn, error);
      if (error.status === 401) askForKey(error.message);
    }
  }
  abortController = null;
  $("send").textContent = "Send";
  $("log").removeAttribute("aria-busy");
  // If the user has cleared the conversation meanwhile, the answer is discarded.
  if (view.turn.isConnected) view.complete(signal.aborted);
}

