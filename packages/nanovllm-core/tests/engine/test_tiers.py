"""Prompts whose blocks come from host memory, because the cache is too small for all conversations."""

import asyncio
import random

import pytest
from toy_model import toy_spec

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_core.cache.copy_time import CopyTimeModel

# A conversation takes 12 of the 20 blocks, so that conversations that alternate evict each other.
CONFIG = EngineConfig(device="cpu", num_blocks=20, max_num_seqs=2, kv_offload_gib=0.01)


@pytest.fixture(autouse=True)
def always_load(monkeypatch):
    """Load prefixes even if to compute them is faster, as it is with a toy model."""
    monkeypatch.setattr(CopyTimeModel, "predict", lambda *_: 0.0)


async def generate(engine: AsyncEngine, name: str, prompt: list[int], count: int) -> list[int]:
    request = Request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


async def converse(engine: AsyncEngine, oracle, num_turns: int) -> None:
    """Three conversations take turns. Each turn adds the answer and a few tokens to the prompt."""
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 97) for _ in range(100)] for _ in range(3)]
    for turn in range(num_turns):
        for index, prompt in enumerate(prompts):
            answer = await generate(engine, f"{turn}-{index}", prompt, 8)
            assert answer == oracle(prompt, 8)
            prompt += answer + [rng.randrange(6, 97) for _ in range(12)]


async def test_evicted_prefixes_come_from_host_memory(oracle):
    engine = await AsyncEngine.start(toy_spec(), CONFIG)
    try:
        await converse(engine, oracle, 4)
        print(engine._loop._scheduler.tier.counters)
    finally:
        await engine.stop()
    assert engine._loop._scheduler.tier.counters.num_loaded_tokens > 0
