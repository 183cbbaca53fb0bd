import asyncio

import pytest
from toy_model import toy_spec

from nanovllm_core import AsyncEngine, ConfigError, EngineConfig, Request, SamplingParams
from nanovllm_core.config_resolution import resolve
from nanovllm_core.execution.forced_acceptance import find_probability

NUM_DRAFTS = 4


@pytest.mark.parametrize("acceptance_length", [1.0, 1.7, 3.0, 4.9, 5.0])
def test_probability_gives_the_acceptance_length(acceptance_length):
    probability = find_probability(acceptance_length, NUM_DRAFTS)
    assert 0 <= probability <= 1
    assert sum(probability**exponent for exponent in range(NUM_DRAFTS + 1)) == pytest.approx(acceptance_length)


async def collect(engine: AsyncEngine, request: Request) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


@pytest.mark.parametrize("acceptance_length", [1.0, 2.5, 5.0])
async def test_first_drafts_are_kept_with_the_probability_of_the_acceptance_length(acceptance_length):
    config = EngineConfig(
        device="cpu",
        num_blocks=100,
        speculate="ngram",
        num_speculative_tokens=NUM_DRAFTS,
        acceptance_length=acceptance_length,
    )
    engine = await AsyncEngine.start(toy_spec(), config)
    try:
        sampling = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
        requests = [Request(f"r{index}", [5, 6, 7], sampling) for index in range(4)]
        answers = await asyncio.gather(*(collect(engine, request) for request in requests))
        stats = engine.stats
    finally:
        await engine.stop()
    assert [len(answer) for answer in answers] == [240] * 4
    verified, accepted = stats.verified_drafts_by_position, stats.accepted_drafts_by_position
    assert verified[0] > 0
    probability = find_probability(acceptance_length, NUM_DRAFTS)
    assert accepted[0] / verified[0] == pytest.approx(probability, abs=0.12 if probability > 1e-6 else 1e-6)


def test_acceptance_length_without_drafts_or_beyond_them_is_refused():
    for settings, reason in (
        ({}, "must be left out without speculate"),
        ({"speculate": "ngram", "num_speculative_tokens": 2}, r"must be 1\.\.3"),
    ):
        with pytest.raises(ConfigError, match=f"acceptance_length is 3.5, but {reason}"):
            resolve(
                EngineConfig(device="cpu", acceptance_length=3.5, **settings),
                max_position=64,
                model_dtype="float32",
                has_cuda=False,
            )
