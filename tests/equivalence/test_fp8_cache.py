"""An FP8 cache changes the default model's answers only a little."""

import asyncio
import math
from collections.abc import Iterable

import pytest

from nanovllm_core import AsyncEngine, EngineConfig, Request, RequestOutput, SamplingParams
from nanovllm_models import load, load_tokenizer

QUESTIONS = [
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a string.",
    "Tell me a short story about a dragon.",
    "Summarise the plot of Romeo and Juliet.",
    "Why is the sky blue?",
]
# Every token up to the expected word is at least 0.8 nats likelier than any other token.
FACTS = {"What is the capital of Japan?": "Tokyo", "What is the opposite of hot?": "cold"}
OUTPUT_LEN, STRIDE = 48, 4
# In nats. The measured mean is 0.009.
MAX_MEAN_DIVERGENCE = 0.02

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return load_tokenizer(default_model)


def encode_questions(tokenizer, questions: Iterable[str]) -> list[list[int]]:
    conversations = ([{"role": "user", "content": question}] for question in questions)
    return [tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False).tolist() for chat in conversations]


async def run(
    model, device, dtype, kv_cache_dtype: str, prompts: list[list[int]], **sampling
) -> list[list[RequestOutput]]:
    config = EngineConfig(
        device=device, dtype=dtype, max_model_len=512, cpu_cache_gib=0.5, kv_cache_dtype=kv_cache_dtype
    )
    engine = await AsyncEngine.start(load(model), config)
    params = SamplingParams(temperature=0, ignore_eos=True, **sampling)

    async def collect(index: int) -> list[RequestOutput]:
        return [output async for output in engine.generate(Request(f"r{index}", prompts[index], params))]

    try:
        return await asyncio.gather(*map(collect, range(len(prompts))))
    finally:
        await engine.stop()


def read_tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def read_likeliest(prompt: list[int], outputs: list[RequestOutput]) -> list[dict[int, float]]:
    """Returns the likeliest tokens at every STRIDE-th position after `prompt`."""
    entries = [*outputs[0].prompt_logprobs]
    return [dict(entry.top) for entry in entries[len(prompt) - 1 :: STRIDE]]


def compute_divergence(exact: dict[int, float], quantised: dict[int, float]) -> float:
    """Kullback-Leibler divergence over the likeliest tokens. A missing token counts as the least likely."""
    lowest = min(quantised.values())
    return sum(math.exp(logprob) * (logprob - quantised.get(token, lowest)) for token, logprob in exact.items())


async def test_an_fp8_cache_keeps_distributions_close(default_model, tokenizer, device):
    dtype, prompts = "float32", encode_questions(tokenizer, QUESTIONS)
    answers = await run(default_model, device, dtype, "auto", prompts, max_tokens=OUTPUT_LEN)
    conversations = [prompt + read_tokens(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    found: list[list[dict[int, float]]] = []
    for kv_cache_dtype in ("auto", "fp8"):
        outputs = await run(
            default_model, device, dtype, kv_cache_dtype, conversations, max_tokens=1, prompt_logprobs=20
        )
        found.append(
            [top for prompt, output in zip(prompts, outputs, strict=True) for top in read_likeliest(prompt, output)]
        )
    exact, quantised = found
    divergences = [compute_divergence(p, q) for p, q in zip(exact, quantised, strict=True)]
    assert len(divergences) == len(QUESTIONS) * OUTPUT_LEN // STRIDE
    assert 0 < sum(divergences) / len(divergences) < MAX_MEAN_DIVERGENCE
    num_same = sum(max(p, key=p.get) == max(q, key=q.get) for p, q in zip(exact, quantised, strict=True))
    assert num_same >= 0.9 * len(divergences)


async def test_an_fp8_cache_keeps_known_facts(default_model, tokenizer, device):
    answers = await run(default_model, device, None, "fp8", encode_questions(tokenizer, FACTS), max_tokens=12)
    for answer, word in zip(answers, FACTS.values(), strict=True):
        assert word in tokenizer.backend.decode(read_tokens(answer))
