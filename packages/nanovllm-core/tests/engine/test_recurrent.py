import asyncio
import random

import pytest
from toy_model import VOCAB
from toy_recurrent import Oracle, recurrent_spec

from nanovllm_core import AsyncEngine, ConfigError, EngineConfig, Request, SamplingParams

NUM_PROMPTS, OUTPUT_LEN = 10, 20
SETTINGS = {
    "all at once": {"num_blocks": 400},
    "depth 1, no prefix cache": {"num_blocks": 400, "depth": 1, "prefix_caching": False},
    "chunked, pages of 32": {"num_blocks": 200, "block_size": 32, "max_num_batched_tokens": 50},
    "preempted": {"num_blocks": 13, "max_num_batched_tokens": 70},
    "few checkpoints": {"num_blocks": 400, "num_state_slots": 11},
}


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    rng = random.Random(1)
    shared = [rng.randrange(6, VOCAB) for _ in range(150)]
    prompts = [
        shared[: rng.choice([0, 70, 140])] + [rng.randrange(6, VOCAB) for _ in range(rng.randrange(1, 30))]
        for _ in range(NUM_PROMPTS)
    ]
    oracle = Oracle()
    return [(prompt, oracle(prompt, OUTPUT_LEN)) for prompt in prompts]


async def generate(engine: AsyncEngine, name: str, prompt: list[int], num_tokens: int = OUTPUT_LEN) -> list[int]:
    request = Request(name, prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings_name", SETTINGS)
async def test_tokens_equal_those_of_the_oracle_for_all_settings(expected, settings_name, device):
    limits = {"max_model_len": 200, "max_num_seqs": 8}
    engine = await AsyncEngine.start(
        recurrent_spec(), EngineConfig(device=device, **limits, **{"depth": 2, **SETTINGS[settings_name]})
    )
    try:
        found = await asyncio.gather(*(generate(engine, f"r{i}", prompt) for i, (prompt, _) in enumerate(expected)))
        assert found == [output for _, output in expected]
        again = [await generate(engine, "again", prompt) for prompt, _ in expected[:4]]
        assert again == found[:4]
        stats = engine.stats
        assert (stats.num_preemptions > 0) == (settings_name == "preempted")
        assert stats.num_free_state_slots == engine.info.num_state_slots
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_checkpoints > 0) == ("no prefix cache" not in settings_name)
        assert (stats.num_cached_prompt_tokens > 0) == ("no prefix cache" not in settings_name)
    finally:
        await engine.stop()


async def test_a_prompt_that_diverges_near_the_end_of_another_computes_few_tokens(expected):
    prompt = [6 + index % 90 for index in range(200)]
    other = [*prompt[:180], *range(10, 30)]
    config = EngineConfig(device="cpu", num_blocks=100, max_num_seqs=2)
    engine = await AsyncEngine.start(recurrent_spec(), config)
    try:
        await generate(engine, "first", prompt, 1)
        num_computed_before = engine.stats.num_computed_tokens
        found = await generate(engine, "second", other, 4)
        assert engine.stats.num_computed_tokens - num_computed_before < 20 + 64 + 4
        assert found == Oracle()(other, 4)
        # The third prompt diverges at the same position, and starts from a checkpoint there.
        third = [*prompt[:180], *range(40, 60)]
        num_computed_before = engine.stats.num_computed_tokens
        assert await generate(engine, "third", third, 4) == Oracle()(third, 4)
        assert engine.stats.num_computed_tokens - num_computed_before < 20 + 64 + 4
    finally:
        await engine.stop()


async def test_too_few_state_slots_are_refused():
    with pytest.raises(ConfigError, match=r"max_num_seqs is 64, but the requests' states take .* lower max_num_seqs"):
        await AsyncEngine.start(recurrent_spec(), EngineConfig(device="cpu", cpu_cache_gib=1e-4))
    with pytest.raises(ConfigError, match="num_state_slots is 8, but must be at least 9"):
        await AsyncEngine.start(recurrent_spec(), EngineConfig(device="cpu", max_num_seqs=8, num_state_slots=8))
