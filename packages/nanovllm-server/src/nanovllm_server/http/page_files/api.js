"use strict";

/* Calls the API. */

const $ = (id) => document.getElementById(id);
const KEY_STORAGE_NAME = "nanovllm-key";

/** An error of the API: {message, type, param, code}. */
class ApiError extends Error {
  constructor(error, status) {
    super(error.message);
    this.details = [status, error.type, error.code, error.param && `param: ${error.param}`].filter(Boolean);
    this.status = status;
  }
}

function authorizationHeaders() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function callApi(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...authorizationHeaders(), ...options.headers } });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error ?? { message: `The server answered ${response.status}.` }, response.status);
}

/** Yields the JSON of each event of a stream, up to [DONE]. */
async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let partialBlock = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const blocks = (partialBlock + value).split("\n\n");
    partialBlock = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      // An event without data is a comment that keeps the connection alive.
      if (data) yield JSON.parse(data);
    }
  }
}

/** Builds the body of a request from the conversation and the controls. Throws if a control has an invalid value. */
function buildRequest() {
  const fields = {};
  for (const control of $("controls").querySelectorAll("input[name]")) {
    if (!control.checkValidity()) throw new Error(`${control.name}: ${control.validationMessage}`);
    if (control.value !== "") fields[control.name] = control.valueAsNumber;
  }
  if ($("effort").value) fields.reasoning_effort = $("effort").value;
  const extraFields = $("further").value.trim();
  if (extraFields) {
    try {
      Object.assign(fields, JSON.parse(extraFields));
    } catch (error) {
      throw new Error(`Further fields are not valid JSON: ${error.message}`);
    }
  }
  const system = $("system").value.trim();
  return {
    model: $("model").value,
    ...fields,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function loadModels() {
  try {
    const { data } = await (await callApi("v1/models")).json();
    $("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
    $("key").setCustomValidity("");
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
  }
}

function askForKey(message) {
  showSettings(true);
  $("key").setCustomValidity(message);
  $("key").reportValidity();
  $("key").focus();
}

