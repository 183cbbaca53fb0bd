"use strict";

/* Shows statistics of the engine, from /metrics. */

// Interval of polls, and the times over which the token rate and the figures of requests are averaged.
const POLL_MS = 1000, RATE_WINDOW_MS = 3000, REQUEST_WINDOW_MS = 60000;
const MAX_RATES = 60;
/**
 * Recent samples of /metrics, oldest first: {time, and each metric's value under the metric's name}. Has only metrics
 * without labels other than model and engine, and metrics of cache tiers, whose names here are "name:tier".
 */
let samples = [];
/** Tokens per second, one number per poll. */
let rates = [];

function parseMetrics(text) {
  const pattern = /^(?:nanovllm|vllm):(\w+)\{(?:engine="\d+",)?model_name="[^"]*"(?:,tier="(\w+)")?\} (\S+)$/gm;
  const entries = Array.from(text.matchAll(pattern), ([, name, tier, value]) => [tier ? `${name}:${tier}` : name, Number(value)]);
  return Object.fromEntries(entries);
}

/** The oldest sample of the last `windowMs`. */
const oldestSample = (windowMs) => samples.find(({ time }) => time >= samples.at(-1).time - windowMs);

const formatDuration = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`);

/** Formats the shares of the whole cache and of its lower tiers. percent(name): a metric's share of prompt tokens. */
function formatHits(percent, sample) {
  const tiers = Object.keys(sample).filter((name) => name.startsWith("kv_offload_hits_total:"));
  const parts = tiers.map((name) => `${name.split(":")[1]} ${percent(name)}%`);
  return `${percent("prefix_cache_hits_total")}%${parts.length ? ` (${parts.join(", ")})` : ""}`;
}

async function pollMetrics() {
  if (!document.hidden) {
    try {
      const sample = { time: performance.now(), ...parseMetrics(await (await callApi("metrics")).text()) };
      // A restarted server counts from zero.
      if (samples.length && sample.generation_tokens_total < samples.at(-1).generation_tokens_total) samples = [];
      samples = [...samples.filter(({ time }) => time > sample.time - REQUEST_WINDOW_MS), sample];
      showStatistics(sample);
      $("figures").classList.remove("stale");
    } catch {
      $("figures").classList.add("stale");
    }
  }
  setTimeout(pollMetrics, POLL_MS);
}

function showStatistics(sample) {
  const rateBase = oldestSample(RATE_WINDOW_MS + POLL_MS / 2);
  const rate = (1000 * (sample.generation_tokens_total - rateBase.generation_tokens_total)) / (sample.time - rateBase.time || 1);
  const base = oldestSample(REQUEST_WINDOW_MS);
  const growth = (name) => sample[name] - (base[name] ?? 0);
  const numRequests = growth("time_to_first_token_seconds_count");
  if (numRequests) $("ttft").textContent = formatDuration(growth("time_to_first_token_seconds_sum") / numRequests);
  const numPromptTokens = growth("prefix_cache_queries_total");
  if (numPromptTokens) $("hits").textContent = formatHits((name) => Math.round((100 * growth(name)) / numPromptTokens), sample);
  $("running").textContent = sample.num_requests_running;
  $("waiting").textContent = sample.num_requests_waiting;
  $("cache").textContent = `${(100 * sample.kv_cache_usage_perc).toFixed(1)}%`;
  $("rate").textContent = rate.toFixed(rate < 100 ? 1 : 0);
  rates = [...rates, rate].slice(-MAX_RATES);
  const maxRate = Math.max(...rates, 1);
  const point = (value, index) => `${index + MAX_RATES - rates.length},${20 - (18 * value) / maxRate}`;
  $("curve").setAttribute("points", rates.map(point).join(" "));
}

