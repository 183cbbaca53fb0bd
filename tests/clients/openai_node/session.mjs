// A session with OpenAI's SDK for Node, with zod schemas.
//
// The SDK takes the base URL and the key from the environment.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const MODEL = "SmolLM2-135M-Instruct";
const messages = [
  { role: "system", content: "You are a guide. Answer briefly." },
  { role: "user", content: "What is the capital of France?" },
];
const asked = { model: MODEL, messages, temperature: 0, max_completion_tokens: 12 };
// The example shows JSON on one line; the model then needs fewer tokens.
const example = '{"name": "Oslo", "population": 7, "mayor": null, "sights": [{"name": "Fjord", "free": true}]}';
const describe = {
  ...asked,
  messages: [{ role: "user", content: `Describe Paris like this: ${example}` }],
  max_completion_tokens: 200,
};
const sdk = new OpenAI({ maxRetries: 0, timeout: 300_000 });
const chat = sdk.chat.completions;

const City = z.object({
  name: z.enum(["Paris", "Rome", "Oslo"]),
  population: z.number().int().min(1).max(99_000_000),
  mayor: z.string().max(16).nullable(),
  sights: z.array(z.object({ name: z.string().max(16), free: z.boolean() })).min(1).max(1),
});
const Weather = z.object({ city: z.enum(["Paris", "Rome", "Oslo"]), days: z.number().int().min(1).max(7) });
const weather = (run) =>
  zodFunction({ name: "get_weather", description: "The weather in a city.", parameters: Weather, function: run });

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("models", async () => {
  const { data } = await sdk.models.list();
  assert.ok(data.some((model) => model.id === MODEL));
  assert.equal((await sdk.models.retrieve(MODEL)).id, MODEL);
  await assert.rejects(sdk.models.retrieve("org/name"), OpenAI.NotFoundError);
});

test("chat", async () => {
  const answer = await chat.create(asked);
  const { message, finish_reason } = answer.choices[0];
  assert.equal(answer.object, "chat.completion");
  assert.equal(message.role, "assistant");
  assert.ok(message.content.length > 0);
  assert.equal(message.refusal, null);
  assert.ok(["stop", "length"].includes(finish_reason));
  const { prompt_tokens, completion_tokens, total_tokens, completion_tokens_details: details } = answer.usage;
  assert.equal(total_tokens, prompt_tokens + completion_tokens);
  assert.deepEqual([details.accepted_prediction_tokens, details.rejected_prediction_tokens], [0, 0]);
  assert.ok(answer._request_id);
});

test("streamed pieces join to the complete answer", async () => {
  const whole = await chat.create({ ...asked, logprobs: true, top_logprobs: 2 });
  const chunks = await collect(
    await chat.create({
      ...asked,
      logprobs: true,
      top_logprobs: 2,
      stream: true,
      stream_options: { include_usage: true },
    }),
  );
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
  assert.deepEqual(new Set(chunks.map((chunk) => chunk.id)), new Set([last.id]));
  const choices = chunks.map((chunk) => chunk.choices[0]);
  assert.equal(choices[0].delta.role, "assistant");
  assert.equal(choices.map(({ delta }) => delta.content ?? "").join(""), whole.choices[0].message.content);
  assert.equal(choices.at(-1).finish_reason, whole.choices[0].finish_reason);
  const tokens = choices.flatMap(({ logprobs }) => logprobs?.content ?? []).map(({ token }) => token);
  assert.deepEqual(tokens, whole.choices[0].logprobs.content.map(({ token }) => token));
});

test("the stream helper joins the same answer", async () => {
  // The SDK throws for an answer that ended at the length limit, so this answer ends at a stop string.
  const stop = (await chat.create(asked)).choices[0].message.content.slice(12, 16);
  const whole = await chat.create({ ...asked, stop });
  const stream = chat.stream({ ...asked, stop, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
});

test("a prediction does not change the answer", async () => {
  const text = (await chat.create(asked)).choices[0].message.content;
  for (const content of [text, [{ type: "text", text }]]) {
    const answer = await chat.create({ ...asked, prediction: { type: "content", content } });
    assert.equal(answer.choices[0].message.content, text);
  }
});

test("several choices", async () => {
  const fields = { ...asked, n: 2, seed: 7, temperature: 1, max_completion_tokens: 8 };
  const whole = await chat.create(fields);
  const texts = ["", ""];
  for (const chunk of await collect(await chat.create({ ...fields, stream: true }))) {
    for (const { index, delta } of chunk.choices) texts[index] += delta.content ?? "";
  }
  assert.deepEqual(texts, whole.choices.map(({ message }) => message.content));
});

test("reasoning", async () => {
  const thinking = new OpenAI({ baseURL: process.env.THINKING_BASE_URL, maxRetries: 0 }).chat.completions;
  const { message } = (await thinking.create({ ...asked, reasoning_effort: "low" })).choices[0];
  assert.equal(message.content, null);
  assert.ok(message.reasoning.length > 0);
  const chunks = await collect(await thinking.create({ ...asked, reasoning_effort: "low", stream: true }));
  assert.equal(chunks.map(({ choices: [{ delta }] }) => delta.reasoning ?? "").join(""), message.reasoning);
});

test("a tool call and its result continue the conversation", async () => {
  const fields = { ...asked, tools: [weather()], parallel_tool_calls: false };
  const first = await chat.create({ ...fields, tool_choice: "required", max_completion_tokens: 80 });
  const { message, finish_reason } = first.choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.equal(message.tool_calls.length, 1);
  const [call] = message.tool_calls;
  Weather.strict().parse(JSON.parse(call.function.arguments));
  const answer = await chat.create({
    ...fields,
    messages: [...messages, message, { role: "tool", tool_call_id: call.id, content: "Sunny, 21 degrees." }],
    tool_choice: "none",
  });
  assert.ok(answer.choices[0].message.content);
});

for (const stream of [false, true]) {
  test(`the runner calls the named function, ${stream ? "streamed" : "whole"}`, async () => {
    const called = [];
    const runner = chat.runTools({
      ...asked,
      stream,
      max_completion_tokens: 80,
      tools: [weather((values) => called.push(values) && "Sunny, 21 degrees.")],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    });
    assert.equal(await runner.finalFunctionToolCallResult(), "Sunny, 21 degrees.");
    assert.deepEqual(called, [Weather.parse(called[0])]);
  });
}

test("streamed tool calls join to the complete calls", async () => {
  const fields = { ...asked, tools: [weather()], tool_choice: "required", parallel_tool_calls: false };
  const whole = await chat.create({ ...fields, max_completion_tokens: 80 });
  const stream = chat.stream({ ...fields, max_completion_tokens: 80 });
  const pieces = [];
  stream.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
  const call = await stream.finalFunctionToolCall();
  assert.ok(pieces.length > 2);
  assert.equal(pieces.join(""), call.arguments);
  assert.equal(call.arguments, whole.choices[0].message.tool_calls[0].function.arguments);
});

test("parse", async () => {
  const answer = await chat.parse({ ...describe, response_format: zodResponseFormat(City, "city") });
  const { message, finish_reason } = answer.choices[0];
  assert.equal(finish_reason, "stop");
  assert.deepEqual(message.parsed, City.strict().parse(JSON.parse(message.content)));
});

test("stream of a parsed object", async () => {
  const fields = { ...describe, response_format: zodResponseFormat(City, "city") };
  const whole = await chat.parse(fields);
  const stream = chat.stream(fields);
  const partial = new Set();
  stream.on("content.delta", ({ parsed }) => partial.add(JSON.stringify(parsed)));
  const final = await stream.finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, whole.choices[0].message.parsed);
  assert.ok(partial.size > 4);
});

test("wrong model", async () => {
  await assert.rejects(chat.create({ ...asked, model: "gpt-4o" }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.deepEqual([error.code, error.param], ["model_not_found", "model"]);
    return true;
  });
});

for (const stream of [false, true]) {
  test(`bad field, ${stream ? "streamed" : "whole"}`, async () => {
    await assert.rejects(chat.create({ ...asked, stream, temperature: 9 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  });
}

test("wrong key", async () => {
  await assert.rejects(new OpenAI({ apiKey: "another" }).chat.completions.create(asked), OpenAI.AuthenticationError);
});

test("timeout", async () => {
  const endless = { ...asked, max_completion_tokens: 1500, ignore_eos: true };
  await assert.rejects(chat.create(endless, { timeout: 500 }), OpenAI.APIConnectionTimeoutError);
});

test("a client that leaves", async () => {
  const stream = await chat.create({ ...asked, stream: true, max_completion_tokens: 1500, ignore_eos: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
  assert.equal((await chat.create({ ...asked, max_completion_tokens: 1 })).usage.completion_tokens, 1);
});
