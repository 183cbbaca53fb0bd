"""The engine in this process, compared with an oracle without cache, batches and steps."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from nanovllm_core import (
    AsyncEngine,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from nanovllm_core.engine import loop

BASE = {"device": "cpu", "num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "depth": 2}


def greedy(name: str, prompt: list[int], count: int, **sampling) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **sampling))


async def collect(engine: AsyncEngine, request: Request) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


async def collect_last_output(engine: AsyncEngine, request: Request) -> RequestOutput:
    outputs = [output async for output in engine.generate(request)]
    return outputs[-1]


async def wait_until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(60):
        while engine.stats.num_requests_running or engine.stats.num_free_blocks < engine.stats.num_blocks:
            await asyncio.sleep(0.01)


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(90) for _ in range(40)]
    return [
        shared[: rng.choice([0, 16, 33])] + [rng.randrange(90) for _ in range(rng.randrange(1, 60))]
        for _ in range(count)
    ]


CONFIGS = {
    "plain": {},
    "depth 1": {"depth": 1},
    "no prefix cache": {"prefix_caching": False},
    "sha256": {"prefix_hash": "sha256"},
    "chunked": {"max_num_batched_tokens": 24},
    "chunked, depth 1": {"max_num_batched_tokens": 24, "depth": 1},
    "preempted": {"num_blocks": 17, "max_model_len": 200},
    "preempted, depth 1, no prefix cache": {
        "num_blocks": 17,
        "max_model_len": 200,
        "depth": 1,
        "prefix_caching": False,
    },
    "pages of 32": {"block_size": 32},
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CONFIGS)
async def test_tokens_equal_those_of_the_oracle_for_all_settings(name, device, toy_spec, oracle):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, **CONFIGS[name], "device": device}))
    rng = random.Random(1)

    async def arrive(index: int, prompt: list[int]) -> list[int]:
        # To force preemptions, all requests arrive at once: a GPU may compute faster than delayed requests arrive.
        await asyncio.sleep(0 if name.startswith("preempted") else rng.random() * 0.05)
        return await collect(engine, greedy(f"r{index}", prompt, 40))

    prompts = make_prompts(16)
    try:
        found = await asyncio.gather(*(arrive(index, prompt) for index, prompt in enumerate(prompts)))
        await wait_until_idle(engine)
        assert (engine.stats.num_preemptions > 0) == name.startswith("preempted")
        assert (engine.stats.num_cached_prompt_tokens > 0) == ("no prefix" not in name)
    finally:
        await engine.stop()
    assert found == [oracle(prompt, 40) for prompt in prompts]


@pytest.fixture
async def engine(toy_spec):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE))
    yield engine
    await engine.stop()


async def test_a_stop_token_ends_a_request_and_is_its_last_token(engine, oracle):
    prompt = make_prompts(1)[0]
    tokens = oracle(prompt, 30)
    stop = tokens[7]
    cut = tokens[: tokens.index(stop) + 1]
    request = greedy("a", prompt, 30, stop_token_ids=(stop,))
    outputs = [output async for output in engine.generate(request)]
    assert [token for output in outputs for token in output.new_token_ids] == cut
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token == stop
    assert (await collect_last_output(engine, greedy("b", prompt, 3))).finish_reason == "length"


async def test_min_tokens_suppresses_stop_tokens(engine, oracle):
    prompt = make_prompts(1)[0]
    stop = oracle(prompt, 1)[0]
    tokens = await collect(engine, greedy("a", prompt, 10, stop_token_ids=(stop,), min_tokens=4))
    assert len(tokens) >= 5
    assert stop not in tokens[:4]


async def test_a_request_ends_where_the_context_is_full(toy_spec):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE, max_model_len=50))
    request = Request("a", list(range(40)), SamplingParams(temperature=0, ignore_eos=True))
    output = await collect_last_output(engine, request)
    assert (output.finish_reason, output.num_output_tokens) == ("length", 10)
    await engine.stop()


async def test_usage_counts_cached_tokens(engine):
    prompt = list(range(50))
    first = await collect_last_output(engine, greedy("a", prompt, 5))
    again = await collect_last_output(engine, greedy("b", prompt, 5))
    salted = Request("c", prompt, SamplingParams(temperature=0, max_tokens=5), cache_salt="other")
    assert (first.num_prompt_tokens, first.num_cached_tokens, first.num_output_tokens) == (50, 0, 5)
    assert again.num_cached_tokens == 48
    assert (await collect_last_output(engine, salted)).num_cached_tokens == 0


async def test_a_seed_gives_the_same_tokens_in_any_batch(engine):
    def sampled(name: str, seed: int | None) -> Request:
        return Request(name, [1, 2, 3], SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, top_p=0.95))

    alone = await collect(engine, sampled("a", 7))
    together = await asyncio.gather(*(collect(engine, sampled(f"b{seed}", seed)) for seed in (7, 8, None)))
    assert together[0] == alone
    assert together[1] != alone
    assert together[2] != alone


async def test_top_p_0_keeps_only_the_likeliest_token(engine, oracle):
    prompt = make_prompts(1)[0]
    sampling = SamplingParams(temperature=2.0, top_p=0.0, max_tokens=20, ignore_eos=True)
    assert await collect(engine, Request("a", prompt, sampling)) == oracle(prompt, 20)


async def test_penalties_and_biases_reach_the_sampler(engine, oracle):
    prompt = make_prompts(1)[0]
    tokens = oracle(prompt, 20)
    assert await collect(engine, greedy("a", prompt, 1, logit_bias={42: 100.0})) == [42]
    penalised = await collect(engine, greedy("b", prompt, 20, frequency_penalty=2.0, presence_penalty=2.0))
    assert penalised[0] == tokens[0]
    assert len(set(penalised)) > len(set(tokens))


async def test_options_of_a_rows_last_request_are_cleared(engine, oracle):
    """In the second batch, one request has options, so the step reads the tables of all rows."""
    prompt = make_prompts(1)[0]
    options = {"logit_bias": {42: 100.0}, "forbidden_sequences": (tuple(oracle(prompt, 1)),)}
    await asyncio.gather(*(collect(engine, greedy(f"a{index}", prompt, 3, **options)) for index in range(8)))
    with_options, *others = await asyncio.gather(
        collect(engine, greedy("b", prompt, 20, **options)),
        *(collect(engine, greedy(f"c{index}", prompt, 20)) for index in range(7)),
    )
    assert with_options == [42] * 20
    assert others == [oracle(prompt, 20)] * 7


@pytest.mark.parametrize("seed", range(4))
async def test_forbidden_sequences_do_not_occur(engine, oracle, seed):
    prompt = make_prompts(4, seed)[seed]
    expected = oracle(prompt, 30)
    # The first sequence begins in the prompt, where it is allowed.
    forbidden = ((prompt[-1], expected[0]), tuple(expected[1:3]), tuple(expected[6:10]), (expected[15],))
    found = await collect(engine, greedy("a", prompt, 30, forbidden_sequences=forbidden))
    assert found[:2] == expected[:2]
    assert found != expected
    for sequence in forbidden:
        assert not any(tuple(found[start : start + len(sequence)]) == sequence for start in range(30))


async def test_logprobs_are_of_the_models_own_distribution(engine):
    request = greedy("a", [1, 2, 3], 4, logprobs=3, logit_bias={42: 100.0})
    entries = [entry async for output in engine.generate(request) for entry in output.logprobs]
    assert len(entries) == 4
    for entry in entries:
        values = [value for _, value in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert 42 not in dict(entry.top)
        assert entry.logprob < values[-1] <= 0


async def test_closing_a_stream_frees_blocks_and_id(engine, monkeypatch):
    monkeypatch.setattr(loop, "STATS_INTERVAL_S", 0)
    stream = engine.generate(greedy("a", list(range(60)), 150))
    await anext(stream)
    assert engine.stats.num_free_blocks < engine.stats.num_blocks
    steps = engine.stats.num_steps
    await stream.aclose()
    await wait_until_idle(engine)
    assert engine.stats.num_steps <= steps + 3
    assert await collect(engine, greedy("a", [1], 2)), "the id can be used again"


async def test_more_urgent_request_goes_first(toy_spec):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, "max_num_seqs": 1}))
    order = []

    async def ask(name: str, priority: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        await collect(engine, Request(name, [1, 2, 3], sampling, priority=priority))
        order.append(name)

    running = asyncio.create_task(ask("running", 9))
    while not engine.stats.num_steps:
        await asyncio.sleep(0)
    await asyncio.gather(running, ask("later", 1), ask("usual", 0), ask("usual too", 0), ask("urgent", -1))
    await engine.stop()
    assert order == ["running", "urgent", "usual", "usual too", "later"]


async def test_duplicate_request_id_is_refused_without_affecting_others(engine, oracle):
    stream = engine.generate(greedy("a", [1, 2, 3], 30))
    tokens = [*(await anext(stream)).new_token_ids]
    with pytest.raises(RequestError, match="in use"):
        await collect(engine, greedy("a", [4], 1))
    tokens += [token async for output in stream for token in output.new_token_ids]
    assert tokens == oracle([1, 2, 3], 30)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", Request("x", [])),
        ("prompt", Request("x", [1] * 256)),
        ("prompt", Request("x", [97])),
        ("prompt", Request("x", [-1])),
        ("prompt", Request("x", np.array([1, 97], np.int32))),
        ("prediction", Request("x", [1], prediction=[97])),
        ("prediction", Request("x", [1], prediction=[1, -1])),
        ("prediction", Request("x", [1], prediction=[1] * 257)),
        ("max_tokens", Request("x", [1], SamplingParams(max_tokens=0))),
        ("max_tokens", Request("x", [1], SamplingParams(max_tokens=-1))),
        ("max_tokens", Request("x", [1], SamplingParams(max_tokens=256))),
        ("temperature", Request("x", [1], SamplingParams(temperature=float("nan")))),
        ("top_p", Request("x", [1], SamplingParams(top_p=-0.1))),
        ("min_p", Request("x", [1], SamplingParams(min_p=1.5))),
        ("top_k", Request("x", [1], SamplingParams(top_k=-2))),
        ("repetition_penalty", Request("x", [1], SamplingParams(repetition_penalty=0.0))),
        ("presence_penalty", Request("x", [1], SamplingParams(presence_penalty=2.5))),
        ("logit_bias", Request("x", [1], SamplingParams(logit_bias={97: 1.0}))),
        ("logit_bias", Request("x", [1], SamplingParams(logit_bias={1: float("inf")}))),
        ("stop_token_ids", Request("x", [1], SamplingParams(stop_token_ids=(99,)))),
        ("allowed_token_ids", Request("x", [1], SamplingParams(allowed_token_ids=(3, 97)))),
        ("allowed_token_ids", Request("x", [1], SamplingParams(allowed_token_ids=(-1, 3)))),
        ("allowed_token_ids", Request("x", [1], SamplingParams(allowed_token_ids=(1,) * 4097))),
        ("forbidden_sequences", Request("x", [1], SamplingParams(forbidden_sequences=((1,), (2, 97))))),
        ("forbidden_sequences", Request("x", [1], SamplingParams(forbidden_sequences=((),)))),
        ("forbidden_sequences", Request("x", [1], SamplingParams(forbidden_sequences=((1,) * 17,)))),
        ("forbidden_sequences", Request("x", [1], SamplingParams(forbidden_sequences=((1,),) * 257))),
        ("logprobs", Request("x", [1], SamplingParams(logprobs=21))),
        ("prompt_logprobs", Request("x", [1], SamplingParams(prompt_logprobs=21))),
        ("prompt_logprobs", Request("x", [1], SamplingParams(prompt_logprobs=-1))),
        ("min_tokens", Request("x", [1], SamplingParams(min_tokens=5, max_tokens=4))),
        ("min_tokens", Request("x", [1], SamplingParams(min_tokens=1 << 31))),
        ("seed", Request("x", [1], SamplingParams(seed=1 << 63))),
        ("cache_salt", Request("x", [1], cache_salt="\ud800")),
    ],
)
async def test_an_invalid_request_raises_an_error_with_the_field(engine, field, request_):
    with pytest.raises(RequestError) as caught:
        await collect(engine, request_)
    assert caught.value.field == field
    assert field.removesuffix("_sequences") in str(caught.value)


async def test_end_tokens_beyond_the_vocabulary_are_refused(toy_spec):
    with pytest.raises(ConfigError, match=r"eos_token_ids is \(5, 97\), but all ids must be from 0 to 96"):
        await AsyncEngine.start(replace(toy_spec(), eos_token_ids=(5, 97)), EngineConfig(**BASE))


async def test_a_failing_step_fails_all_requests_with_the_reason(toy_spec, caplog):
    engine = await AsyncEngine.start(toy_spec("failing"), EngineConfig(**BASE))
    good = engine.generate(greedy("good", [1], 200))
    await anext(good)
    with pytest.raises(EngineDeadError, match="a poisoned token"):
        await collect(engine, greedy("bad", [96], 2))
    with pytest.raises(EngineDeadError, match="a poisoned token"):
        async for _ in good:
            pass
    with pytest.raises(EngineDeadError):
        await collect(engine, greedy("late", [1], 2))
    assert "a poisoned token" in engine.death_reason
    assert "the engine failed" in caplog.text
    await engine.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 300}, "max_model_len is 300"),
        ({"max_num_batched_tokens": 10}, "max_num_batched_tokens is 10"),
        ({"block_size": 17}, "block_size is 17"),
        ({"num_blocks": 3, "max_model_len": 100}, "fewer than max_model_len"),
        ({"depth": 3}, "depth is 3"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"attention_backend": "triton"}, "needs a GPU"),
    ],
)
async def test_an_invalid_setting_is_named_in_the_error(toy_spec, settings, message):
    with pytest.raises(ConfigError, match=message):
        await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, **settings}))


async def test_a_small_cache_shortens_the_context(toy_spec):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, "num_blocks": 3}))
    assert engine.info.max_model_len == 48
    await engine.stop()
