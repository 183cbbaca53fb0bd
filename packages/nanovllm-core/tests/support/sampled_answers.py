"""Compares answers of engines to requests with every sampling option."""

import asyncio
import time

import grammars
import pytest
import toy_model

from nanovllm_core import AsyncEngine, EngineConfig, ModelSpec, Request, RequestOutput, SamplingParams

MAX_RELEASE_S = 60
PROMPTS = [[7, 8, 9], [7, 8, 9, *range(10, 50)], [11], [*range(20, 60)], [7, 8, 9, *range(10, 48), 3]]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.9, seed=4, top_k=9, top_p=0.8, min_p=0.02, max_tokens=20, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0.9, seed=5, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2, max_tokens=20
    ),
    "biased": SamplingParams(
        temperature=0, logit_bias={11: 4.0, 12: -50.0}, forbidden_sequences=((11, 11),), min_tokens=9, max_tokens=20
    ),
    "allowed": SamplingParams(temperature=0, allowed_token_ids=(40, 41, 42), max_tokens=20, ignore_eos=True),
    "constrained": SamplingParams(temperature=0.7, seed=6, grammar=grammars.REGEX, max_tokens=40),
    "with log-probabilities": SamplingParams(temperature=0, logprobs=4, prompt_logprobs=3, max_tokens=5),
}


async def collect(engine, prompt: list[int], sampling: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(Request(name, prompt, sampling))]


async def answer_all(
    config: EngineConfig, prompts: list[list[int]], spec: ModelSpec | None = None
) -> dict[str, list[RequestOutput]]:
    engine = await AsyncEngine.start(spec or toy_model.toy_spec(), config)
    try:
        names = [f"{name} {index}" for name in SAMPLINGS for index in range(len(prompts))]
        pairs = [(prompt, sampling) for sampling in SAMPLINGS.values() for prompt in prompts]
        outputs = await asyncio.gather(*(collect(engine, *pair, name) for pair, name in zip(pairs, names, strict=True)))
        assert engine.info.num_blocks == config.num_blocks * (2 if config.dp_attention else 1)
        # A step in flight may still use the blocks of a finished request.
        deadline_s = time.monotonic() + MAX_RELEASE_S
        while engine.stats.num_free_blocks < engine.info.num_blocks:
            assert time.monotonic() < deadline_s, "the engine does not release all blocks"
            await asyncio.sleep(0.01)
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
    finally:
        await engine.stop()
    return dict(zip(names, outputs, strict=True))


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def compare_answers(found: dict[str, list[RequestOutput]], expected: dict[str, list[RequestOutput]]) -> None:
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs), name
        assert [output.finish_reason for output in found[name]][-1] == outputs[-1].finish_reason
        entries, expected_entries = (
            [entry for output in group for entry in output.logprobs or ()] for group in (found[name], outputs)
        )
        assert len(entries) == len(expected_entries)
        for entry, expected_entry in zip(entries, expected_entries, strict=True):
            assert entry.logprob == pytest.approx(expected_entry.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in expected_entry.top]
        prompt_entries, expected_prompt_entries = found[name][0].prompt_logprobs, outputs[0].prompt_logprobs
        assert (prompt_entries is None) == (expected_prompt_entries is None)
        for entry, expected_entry in zip(prompt_entries or (), expected_prompt_entries or (), strict=True):
            assert (entry.logprob, entry.rank) == (pytest.approx(expected_entry.logprob, abs=1e-4), expected_entry.rank)
