// A session with OpenAI's own SDK for Node, zod's schemas included.
//
// Base URL and key are taken from the environment, as the SDK does.

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
const sdk = new OpenAI({ maxRetries: 0, timeout: 60_000 });
const chat = sdk.chat.completions;

const City = z.object({
  name: z.enum(["Paris", "Rome", "Oslo"]),
  population: z.number().int().min(1).max(99_000_000),
  mayor: z.string().max(16).nullable(),
  sights: z.array(z.object({ name: z.string().max(16), free: z.boolean() })).min(1).max(2),
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
});

test("chat", async () => {
  const answer = await chat.create(asked);
  const { message, finish_reason } = answer.choices[0];
  assert.equal(answer.object, "chat.completion");
  assert.equal(message.role, "assistant");
  assert.ok(message.content.length > 0);
  assert.equal(message.refusal, null);
  assert.ok(["stop", "length"].includes(finish_reason));
  const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
  assert.equal(total_tokens, prompt_tokens + completion_tokens);
  assert.ok(answer._request_id);
});

test("a stream is the whole in pieces", async () => {
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

test("the stream helper gathers the same", async () => {
  // It takes no answer that the length limit ended.
  const stop = (await chat.create(asked)).choices[0].message.content.slice(12, 16);
  const whole = await chat.create({ ...asked, stop });
  const stream = chat.stream({ ...asked, stop, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
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
  const { message } = (await chat.create({ ...asked, reasoning_effort: "low" })).choices[0];
  assert.equal(message.content, null);
  assert.ok(message.reasoning.length > 0);
  const chunks = await collect(await chat.create({ ...asked, reasoning_effort: "low", stream: true }));
  assert.equal(chunks.map(({ choices: [{ delta }] }) => delta.reasoning ?? "").join(""), message.reasoning);
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
