import asyncio
import random

import pytest
import torch
import toy_model

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_core.config_resolution import resolve
from nanovllm_core.execution.runner import start_runner

BASE = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_dtype": "fp8", "depth": 2}
CONFIGS = {
    "plain": {},
    "chunked, depth 1, pages of 32": {"max_num_batched_tokens": 40, "depth": 1, "block_size": 32},
    "preempted": {"num_blocks": 17, "max_model_len": 200},
    "no prefix cache": {"prefix_caching": False},
}
OUTPUT_LEN = 40


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(90) for _ in range(40)]
    return [
        shared[: rng.choice([0, 16, 33])] + [rng.randrange(90) for _ in range(rng.randrange(1, 60))] for _ in range(16)
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    oracle = toy_model.make_oracle(fp8_cache=True)
    return [oracle(prompt, OUTPUT_LEN) for prompt in make_prompts()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CONFIGS)
async def test_tokens_equal_those_of_an_oracle_with_quantised_keys_and_values(name, device, toy_spec, expected):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, **CONFIGS[name], "device": device}))
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)

    async def collect(index: int, prompt: list[int]) -> list[int]:
        outputs = engine.generate(Request(f"r{index}", prompt, sampling))
        return [token async for output in outputs for token in output.new_token_ids]

    try:
        found = await asyncio.gather(*(collect(index, prompt) for index, prompt in enumerate(make_prompts())))
        assert (engine.stats.num_preemptions > 0) == (name == "preempted")
        assert engine.info.kv_cache_dtype == "float8_e4m3fn"
    finally:
        await engine.stop()
    is_equal = [answer == wanted for answer, wanted in zip(found, expected, strict=True)]
    # On a GPU, sums may differ in the last bit. This may change a few tokens.
    assert all(is_equal) if device == "cpu" else sum(is_equal) >= 12


def test_fp8_cache_changes_tokens(oracle, expected):
    """Otherwise, the test above could not notice a missing quantisation."""
    assert [oracle(prompt, OUTPUT_LEN) for prompt in make_prompts()] != expected


@pytest.mark.parametrize(("kind", "itemsize"), [("auto", 4), ("fp8", 1)])
def test_the_cache_has_the_planned_size(toy_spec, kind, itemsize):
    config = EngineConfig(device="cpu", num_blocks=20, max_model_len=64, kv_cache_dtype=kind)
    resolved = resolve(config, max_position=256, model_dtype=torch.float32, has_cuda=False)
    cache = start_runner(toy_spec(), resolved).cache
    assert sum(tensor.nbytes for tensor in (*cache.kv_caches, *cache.kv_scales)) == cache.kv_bytes
    assert cache.kv_caches[0].element_size() == itemsize
