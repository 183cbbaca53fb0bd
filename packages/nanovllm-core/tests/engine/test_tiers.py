"""Prompts whose blocks come from host memory or files, because the cache is too small for all conversations."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import toy_model
from summing_model import continue_sum, summing_spec
from toy_recurrent import Oracle, recurrent_spec

from nanovllm_core import (
    AsyncEngine,
    ConfigError,
    EngineClient,
    EngineConfig,
    EngineDeadError,
    ModelSpec,
    Request,
    SamplingParams,
)
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.cache.host_memory import HostMemory
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.engine.trace import TRACK_IDS
from nanovllm_core.execution import entry_copier

CONFIG = EngineConfig(device="cpu", num_blocks=20, max_num_seqs=2, kv_offload_gib=0.01)
NUM_TURNS = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
AnswerFunction = Callable[[list[int], int], list[int]]


@pytest.fixture(autouse=True)
def always_load(monkeypatch):
    """Load prefixes even if computing them is faster, as it is with a toy model."""
    monkeypatch.setattr(CopyTimeModel, "predict", lambda *_: 0.0)


async def generate(engine: AsyncEngine, name: str, prompt: list[int], count: int) -> list[int]:
    request = Request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


async def converse(engine: AsyncEngine, expected_answer: AnswerFunction, num_turns: int = NUM_TURNS) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 97) for _ in range(100)] for _ in range(3)]
    for turn in range(num_turns):
        for index, prompt in enumerate(prompts):
            tokens = await generate(engine, f"{turn}-{index}", prompt, 8)
            assert tokens == expected_answer(prompt, 8)
            await wait_for_copies(engine)
            prompt += tokens + [rng.randrange(6, 97) for _ in range(12)]


async def wait_for_copies(engine: AsyncEngine) -> None:
    scheduler, deadline = engine._loop._scheduler, time.monotonic() + 60
    # The stats count a block as free only when no copy holds the block.
    while scheduler.has_copies or scheduler.tier._store_queue or engine.stats.num_free_blocks < engine.stats.num_blocks:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def check(spec: ModelSpec, config: EngineConfig, expected_answer: AnswerFunction) -> None:
    """Hold conversations, and check that most cached tokens come from host memory."""
    engine = await AsyncEngine.start(spec, config)
    try:
        await converse(engine, expected_answer)
        stats = engine.stats
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_state_slots == engine.info.num_state_slots
        assert stats.num_failed_loads == 0
    finally:
        await engine.stop()
    assert dict(stats.loaded_tokens)["host"] > stats.num_cached_prompt_tokens / 2 > NUM_TURNS * 80


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"depth": 2},
        {"max_num_batched_tokens": 24},
        {"block_size": 32, "num_blocks": 8},
        {"prefix_hash": "sha256"},
        {"speculate": "ngram"},
    ],
    ids=str,
)
async def test_evicted_prefixes_come_from_host_memory(settings, device, oracle):
    await check(toy_model.toy_spec(), replace(CONFIG, device=device, **settings), oracle)


async def test_blocks_are_stored_when_the_host_memory_is_pinned_while_no_request_runs(monkeypatch):
    set_ready = HostMemory.set_ready
    monkeypatch.setattr(HostMemory, "set_ready", lambda *_: None)
    engine = await AsyncEngine.start(toy_model.toy_spec(), CONFIG)
    try:
        await generate(engine, "early", [*range(6, 90)], 2)
        await asyncio.sleep(0.3)
        assert dict(engine.stats.copied_bytes)["store"] == 0
        set_ready(engine._loop._copier.memory, 0)
        await wait_for_copies(engine)
        assert dict(engine.stats.copied_bytes)["store"] > 0
    finally:
        await engine.stop()


@pytest.fixture
def closed_parts(monkeypatch) -> list[str]:
    """The names of the classes of the cache's parts that were closed, in order."""
    closed: list[str] = []
    for part_class in (entry_copier.EntryCopier, HostTier):
        monkeypatch.setattr(part_class, "close", lambda part: closed.append(type(part).__name__))
    return closed


async def test_a_failed_start_ends_the_threads_that_copy(closed_parts, monkeypatch):
    monkeypatch.setattr("nanovllm_core.engine.build.calibrate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await AsyncEngine.start(toy_model.toy_spec(), CONFIG)
    assert sorted(closed_parts) == ["EntryCopier", "HostTier"]


async def test_a_failed_step_ends_the_threads_that_copy(closed_parts, monkeypatch):
    engine = await AsyncEngine.start(toy_model.toy_spec(), CONFIG)
    monkeypatch.setattr(engine._loop._runner, "launch", lambda _: 1 / 0)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        await generate(engine, "r", [5], 1)
    await engine.stop()
    assert closed_parts == ["EntryCopier", "HostTier"]


async def generate_and_count_cached_tokens(engine: AsyncEngine, name: str, prompt: list[int]) -> int:
    request = Request(name, prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [output.num_cached_tokens async for output in engine.generate(request)][-1]


@pytest.mark.parametrize(("spec", "settings"), [(toy_model.toy_spec(), {}), (recurrent_spec(), {"num_state_slots": 8})])
async def test_simultaneous_loads_do_not_evict_each_other(spec, settings):
    engine = await AsyncEngine.start(spec, replace(CONFIG, **settings))
    # The cache has space for two of these prompts.
    prompts = [[index + 6] * 140 for index in range(6)]
    try:
        for index, prompt in enumerate(prompts):
            await generate_and_count_cached_tokens(engine, f"new {index}", prompt)
            await wait_for_copies(engine)
        returned = await asyncio.gather(
            *(
                generate_and_count_cached_tokens(engine, f"returned {index}", prompt)
                for index, prompt in enumerate(prompts)
            )
        )
        assert min(returned) >= 128
        await wait_for_copies(engine)
        assert engine.stats.num_free_state_slots == engine.info.num_state_slots
    finally:
        await engine.stop()


async def test_fp8_blocks_return_with_their_scales():
    expected_answer = toy_model.make_oracle(fp8_cache=True)
    await check(toy_model.toy_spec(), replace(CONFIG, kv_cache_dtype="fp8"), expected_answer)


@pytest.mark.parametrize("device", DEVICES)
async def test_recurrent_states_return_with_their_blocks(device):
    await check(recurrent_spec(), replace(CONFIG, device=device, num_state_slots=6), Oracle())


@pytest.mark.parametrize("method", ["draft", "mtp"])
async def test_entries_of_draft_models_and_heads_return(method, always_drafts):
    draft = summing_spec() if method == "draft" else None
    config = replace(CONFIG, speculate=method, num_speculative_tokens=3)
    await check(summing_spec(draft=draft), config, continue_sum)


@pytest.mark.background
@pytest.mark.parametrize(
    "settings", [{}, {"dp_attention": True, "num_blocks": 14, "max_num_batched_tokens": 64}], ids=str
)
async def test_each_rank_loads_its_part(settings, oracle):
    config = replace(CONFIG, tensor_parallel_size=2, **settings)
    await check(toy_model.toy_spec(), config, oracle)


async def test_prompt_log_probabilities_are_computed_although_blocks_could_be_loaded(oracle):
    engine = await AsyncEngine.start(toy_model.toy_spec(), CONFIG)
    try:
        await converse(engine, oracle, 2)
        rng = random.Random(0)
        prompt = [rng.randrange(6, 97) for _ in range(100)]
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
        outputs = [output async for output in engine.generate(Request("scored", prompt, sampling))]
    finally:
        await engine.stop()
    assert [token for output in outputs for token in output.new_token_ids] == oracle(prompt, 4)
    assert sum(len(output.prompt_logprobs or ()) for output in outputs) == len(prompt) - 1


async def test_a_prompt_is_computed_if_its_load_fails(oracle, monkeypatch):
    engine = await AsyncEngine.start(toy_model.toy_spec(), CONFIG)
    scatter = entry_copier.scatter_blocks

    def scatter_garbage(parts, blocks, rows):
        scatter(parts, blocks, rows.fill_(63))
        raise RuntimeError("an injected failure")

    try:
        await converse(engine, oracle, 1)
        monkeypatch.setattr(entry_copier, "scatter_blocks", scatter_garbage)
        await converse(engine, oracle)
        stats = engine.stats
        assert stats.num_failed_loads > 0
        assert dict(stats.loaded_tokens) == {"host": 0}
        assert stats.num_free_blocks == stats.num_blocks
    finally:
        await engine.stop()


async def test_loads_that_take_longer_than_computing_are_rejected(oracle, monkeypatch):
    monkeypatch.setattr(CopyTimeModel, "predict", lambda *_: 1e9)
    engine = await AsyncEngine.start(toy_model.toy_spec(), CONFIG)
    try:
        await converse(engine, oracle)
        assert engine.stats.rejected_load_tokens > 0
        assert dict(engine.stats.loaded_tokens) == {"host": 0}
    finally:
        await engine.stop()


async def test_the_trace_has_a_span_for_each_load(oracle, tmp_path):
    engine = await AsyncEngine.start(toy_model.toy_spec(), replace(CONFIG, trace=tmp_path / "trace.json"))
    try:
        await converse(engine, oracle, 2)
    finally:
        await engine.stop()
    events = [json.loads(line.rstrip(",")) for line in (tmp_path / "trace.json").read_text().splitlines()[1:]]
    loads = [event for event in events if event["ph"] == "X" and event["tid"] == TRACK_IDS["load"]]
    assert {event["name"] for event in loads} <= {f"request 1-{index}" for index in range(3)}
    assert sum(event["args"]["host_tokens"] for event in loads) == dict(engine.stats.loaded_tokens)["host"] > 0


def with_fingerprint(spec: ModelSpec) -> ModelSpec:
    return replace(spec, fingerprint="toy", draft=None if spec.draft is None else with_fingerprint(spec.draft))


async def wait_for_files(engine: AsyncEngine) -> None:
    await wait_for_copies(engine)
    tier, deadline = engine._loop._scheduler.tier, time.monotonic() + 60
    while tier.is_busy or tier._write_queue:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("spec", "settings", "make_expected_answer"),
    [
        (toy_model.toy_spec(), {}, None),
        (recurrent_spec(), {"num_state_slots": 6}, Oracle),
        (summing_spec(draft=summing_spec()), {"speculate": "draft"}, lambda: continue_sum),
        pytest.param(toy_model.toy_spec(), {"device": "cuda"}, None, marks=pytest.mark.gpu),
        pytest.param(recurrent_spec(), {"device": "cuda", "num_state_slots": 6}, Oracle, marks=pytest.mark.gpu),
    ],
    ids=["attention", "recurrent", "draft model", "attention on a GPU", "recurrent on a GPU"],
)
async def test_prefixes_return_from_files_after_a_restart(spec, settings, make_expected_answer, oracle, tmp_path: Path):
    expected_answer = oracle if make_expected_answer is None else make_expected_answer()
    config = replace(CONFIG, kv_offload_dir=tmp_path / "kv", kv_offload_disk_gib=0.1, **settings)
    engine = await AsyncEngine.start(with_fingerprint(spec), config)
    try:
        # Writes begin when the directory has been scanned.
        for store in engine._loop._scheduler.tier.files._stores:
            await asyncio.to_thread(store.indexed.wait, 60)
        await converse(engine, expected_answer, 2)
        await wait_for_files(engine)
    finally:
        await engine.stop()
    engine = await AsyncEngine.start(with_fingerprint(spec), config)
    try:
        for store in engine._loop._scheduler.tier.files._stores:
            await asyncio.to_thread(store.indexed.wait, 60)
        await converse(engine, expected_answer, 1)
        assert dict(engine.stats.loaded_tokens)["disk"] >= 3 * 64
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
    finally:
        await engine.stop()


async def test_a_model_without_fingerprint_can_not_use_files(tmp_path):
    config = replace(CONFIG, kv_offload_dir=tmp_path / "kv")
    with pytest.raises(ConfigError, match="kv_offload_dir and transfers need a model with a fingerprint"):
        await AsyncEngine.start(toy_model.toy_spec(), config)


@pytest.mark.parametrize("in_process", [True, False])
async def test_no_request_finds_blocks_after_a_reset(in_process, oracle, tmp_path):
    config = replace(CONFIG, kv_offload_dir=tmp_path / "kv")
    start = AsyncEngine.start if in_process else EngineClient.launch
    engine = await start(with_fingerprint(toy_model.toy_spec()), config)
    try:
        prompt = list(range(6, 90))
        assert await generate(engine, "first", prompt, 4) == oracle(prompt, 4)
        await engine.reset_prefix_cache()
        assert await generate(engine, "second", prompt, 4) == oracle(prompt, 4)
        num_cached_tokens_after_reset = engine.stats.num_cached_prompt_tokens
        assert await generate(engine, "third", prompt, 4) == oracle(prompt, 4)
        assert num_cached_tokens_after_reset == 0 < engine.stats.num_cached_prompt_tokens
    finally:
        await engine.stop()
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()
