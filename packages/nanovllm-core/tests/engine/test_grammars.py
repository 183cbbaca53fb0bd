"""Answers held to grammars, beside free ones, over every setting."""

import asyncio
import random
import time
from dataclasses import replace

import pytest
import toy_model
from grammars import CHECKS, EBNF, JSON, REGEX, SLOW, TAG, XML, XML_TYPES, text_of, toy_compiler

from nanovllm_core import (
    AsyncEngine,
    Budget,
    EngineClient,
    EngineConfig,
    EngineDeadError,
    GrammarError,
    GrammarSpec,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from nanovllm_core.execution import constraints
from nanovllm_core.grammar import vetting

BASE = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "depth": 2}
CONFIGS = {
    "plain": {},
    "depth 1": {"depth": 1},
    "chunked": {"max_num_batched_tokens": 24},
    "chunked, depth 1, no prefix cache": {"max_num_batched_tokens": 24, "depth": 1, "prefix_caching": False},
    "preempted": {"num_blocks": 17, "max_model_len": 200},
    "preempted, chunked, depth 1": {"num_blocks": 17, "max_model_len": 200, "depth": 1, "max_num_batched_tokens": 24},
}
GPU_CONFIGS = {
    "no graphs": {"graph_mode": "none"},
    "only decodes from graphs": {"graph_mode": "full_decode_only"},
    "mixed steps in pieces": {"graph_mode": "piecewise", "max_num_batched_tokens": 80},
    "not compiled": {"compile": False},
}
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.7, "min_tokens": 30},
    {"temperature": 0.8, "ignore_eos": True, "frequency_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": {toy_model.EOS: -100.0, 3: 50.0}, "logprobs": 2},
]
OUTPUT = 60


@pytest.fixture(scope="module")
def compiler():
    return toy_compiler()


@pytest.fixture
async def engine(toy_spec, vetter, monkeypatch):
    vetter.use(monkeypatch)
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE, device="cpu"))
    yield engine
    await engine.stop()


def request(name: str, prompt: list[int], grammar: GrammarSpec | None, **sampling) -> Request:
    return Request(name, prompt, SamplingParams(**{"max_tokens": OUTPUT, "grammar": grammar, **sampling}))


async def collect(engine, request: Request, most: int = 1000) -> list[RequestOutput]:
    """Its outputs, or those up to `most` tokens, and then it is aborted."""
    outputs: list[RequestOutput] = []
    stream = engine.generate(request)
    async for output in stream:
        outputs.append(output)
        if output.num_output_tokens >= most:
            break
    await stream.aclose()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def check(compiler, spec: GrammarSpec, outputs: list[RequestOutput]) -> None:
    """An answer that ended matches its grammar; one that was cut begins as one that does."""
    tokens = tokens_of(outputs)
    if outputs[-1].finish_reason == "stop":
        assert outputs[-1].stop_token == toy_model.EOS
        assert tokens.index(toy_model.EOS) == len(tokens) - 1
        assert CHECKS[spec](text_of(tokens)), text_of(tokens)
        return
    matcher = compiler.compile(spec).start()
    assert all(matcher.accept(token) for token in tokens), text_of(tokens)


async def serve(toy_spec, compiler, oracle, device: str, settings: dict) -> tuple[int, int]:
    """Many of all kinds at random times: how many ended of themselves, and how many were preempted."""
    config = EngineConfig(**{**BASE, **settings, "device": device}, forbid_sync=device == "cuda")
    engine = await AsyncEngine.start(toy_spec(), config)
    rng, finished = random.Random(3), 0

    async def held(index: int, spec: GrammarSpec) -> None:
        nonlocal finished
        await asyncio.sleep(rng.random() * 0.1)
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 60))]
        most = rng.choice([1, 7, 1000, 1000, 1000])
        asked = request(f"h{index}", prompt, spec, seed=index, **SETTINGS[index % len(SETTINGS)])
        outputs = await collect(engine, asked, most)
        finished += outputs[-1].finish_reason == "stop"
        check(compiler, spec, outputs)

    async def free(index: int) -> None:
        await asyncio.sleep(rng.random() * 0.1)
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 60))]
        outputs = await collect(engine, request(f"f{index}", prompt, None, temperature=0, ignore_eos=True))
        assert tokens_of(outputs) == oracle(prompt, OUTPUT)

    try:
        work = [held(index, spec) for index, spec in enumerate([*CHECKS] * 6)]
        await asyncio.gather(*work, *map(free, range(8)))
        async with asyncio.timeout(10):
            while engine.stats.num_requests_running or engine.stats.num_free_blocks < engine.stats.num_blocks:
                await asyncio.sleep(0.01)
        return finished, engine.stats.num_preemptions
    finally:
        await engine.stop()


@pytest.mark.parametrize("name", CONFIGS)
async def test_answers_match_grammars_and_other_requests_are_unchanged(
    name, toy_spec, compiler, oracle, vetter, monkeypatch
):
    vetter.use(monkeypatch)
    finished, preemptions = await serve(toy_spec, compiler, oracle, "cpu", CONFIGS[name])
    assert finished >= 8
    assert (preemptions > 0) == name.startswith("preempted")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CONFIGS, *GPU_CONFIGS])
async def test_answers_match_on_a_gpu(name, toy_spec, compiler, oracle, vetter, monkeypatch):
    vetter.use(monkeypatch)
    finished, _ = await serve(toy_spec, compiler, oracle, "cuda", {**CONFIGS, **GPU_CONFIGS}[name])
    assert finished >= 8


async def test_a_seed_gives_the_same_answer_in_any_company(engine):
    async def ask(name: str, seed: int) -> list[int]:
        return tokens_of(await collect(engine, request(name, [1, 2, 3], JSON, seed=seed)))

    alone = await ask("a", 7)
    company = (collect(engine, request(f"c{index}", [index], REGEX)) for index in range(3))
    together, other, *_ = await asyncio.gather(ask("b", 7), ask("c", 8), *company)
    assert together == alone
    assert other != alone


async def test_logprobs_are_of_the_models_own_distribution(engine):
    free, held = [
        (await collect(engine, request(name, [1, 2], grammar, temperature=0, logprobs=3, max_tokens=1)))[0]
        for name, grammar in (("a", None), ("b", REGEX))
    ]
    assert held.logprobs[0].top == free.logprobs[0].top
    assert held.logprobs[0].logprob < free.logprobs[0].logprob


async def test_where_only_the_end_is_allowed_it_comes_whatever_holds_it_back(engine):
    held_back = {"min_tokens": 40, "ignore_eos": True, "logit_bias": {toy_model.EOS: -100.0}}
    outputs = await collect(engine, request("a", [1, 2], GrammarSpec("regex", "ab"), **held_back))
    assert text_of(tokens_of(outputs)) == b"ab"
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", toy_model.EOS)
    # Where something else is, min_tokens holds.
    outputs = await collect(engine, request("b", [1, 2], GrammarSpec("regex", "(ab)+"), min_tokens=20, temperature=0))
    assert len(tokens_of(outputs)) > 20


async def test_stop_token_ids_stop_where_the_grammar_allows_them(engine):
    pieces = toy_model.toy_vocabulary().tokens
    stop = pieces.index(b",")
    outputs = await collect(engine, request("a", [1, 2], GrammarSpec("regex", "a,b,"), stop_token_ids=(stop,)))
    assert text_of(tokens_of(outputs)) == b"a,"
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", stop)


@pytest.mark.parametrize("depth", [1, 2])
async def test_budget_closes_an_overlong_first_part(depth, toy_spec, oracle):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, "depth": depth}, device="cpu"))
    prompt = [7, 8, 9]
    free = oracle(prompt, 40)

    async def ask(name: str, budget: Budget) -> list[int]:
        asked = request(name, prompt, None, temperature=0, ignore_eos=True, max_tokens=40, budget=budget)
        return tokens_of(await collect(engine, asked))

    absent = [token for token in range(toy_model.VOCAB) if token not in free][:3]
    try:
        found, begun, early, late, alone = await asyncio.gather(
            ask("a", Budget(10, tuple(absent))),
            ask("b", Budget(10, (free[9], *absent))),
            ask("c", Budget(10, tuple(free[3:6]))),
            ask("d", Budget(40, tuple(absent))),
            ask("e", Budget(0, (absent[0],))),
        )
    finally:
        await engine.stop()
    assert found[:13] == [*free[:10], *absent]
    assert found[13:] == oracle([*prompt, *found[:13]], 27)
    assert begun[:13] == [*free[:10], *absent]
    assert early == free
    assert late == free
    assert alone == [absent[0], *oracle([*prompt, absent[0]], 39)]


async def test_a_budget_goes_through_the_grammar(engine, compiler):
    end = tuple(toy_model.toy_vocabulary().tokens.index(piece) for piece in (b"</t", b"hink>"))
    asked = [request(f"r{seed}", [seed], TAG, seed=seed, budget=Budget(12, end), max_tokens=120) for seed in range(6)]
    answers = await asyncio.gather(*(collect(engine, each) for each in asked))
    for outputs in answers:
        check(compiler, TAG, outputs)
        thought, tag, _ = text_of(tokens_of(outputs)).partition(b"</think>")
        assert tag
        assert len(thought) <= 3 * 12
    assert any(outputs[-1].finish_reason == "stop" for outputs in answers)
    # It allows no such end: the grammar wins.
    outputs = await collect(engine, request("b", [1], REGEX, budget=Budget(2, end)))
    check(compiler, REGEX, outputs)


async def test_hostile_grammars_fail_in_time_while_others_go_on(monkeypatch, toy_spec, oracle):
    monkeypatch.setattr(vetting, "MAX_SECONDS", 1.5)
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE, device="cpu"))
    try:
        await engine.compile(REGEX)
        slow = [asyncio.create_task(collect(engine, request(f"s{i}", [1], SLOW))) for i in range(2)]
        begin = time.monotonic()
        prompt, rounds = [3, 4], 0
        while not slow[0].done():
            outputs = await collect(engine, request(f"f{rounds}", prompt, None, temperature=0, ignore_eos=True))
            assert tokens_of(outputs) == oracle(prompt, OUTPUT)
            rounds += 1
        assert 1 < time.monotonic() - begin < 6
        assert rounds > 3
        for task in slow:
            with pytest.raises(GrammarError, match="takes more than 1.5 s"):
                await task
        assert engine.stats.num_requests_waiting == 0
    finally:
        await engine.stop()


async def test_a_request_waits_for_its_grammar_and_can_be_aborted_meanwhile(engine):
    stream = engine.generate(request("a", [1], SLOW))
    coming = asyncio.create_task(anext(stream))
    async with asyncio.timeout(10):
        while not engine.stats.num_requests_waiting:
            await asyncio.sleep(0.01)
    assert not coming.done()
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    outputs = await collect(engine, request("b", [1], REGEX))
    assert CHECKS[REGEX](text_of(tokens_of(outputs)))
    assert engine.stats.num_requests_waiting == 0


async def test_failing_grammar_fails_only_its_request(engine, monkeypatch, oracle):
    free = asyncio.create_task(collect(engine, request("f", [5, 6], None, temperature=0, ignore_eos=True)))
    # The letter has no token in this vocabulary.
    with pytest.raises(GrammarError, match="allows no token of the vocabulary"):
        await collect(engine, request("a", [1], GrammarSpec("regex", "ab€")))
    monkeypatch.setattr(constraints, "_TIME_LIMIT", 0.0)
    monkeypatch.setattr(constraints, "_TIME_LIMIT_PER_TOKEN", 0.0)
    with pytest.raises(GrammarError, match="takes too long to follow"):
        await collect(engine, request("b", [1], EBNF))
    assert tokens_of(await free) == oracle([5, 6], OUTPUT)
    assert engine.dead is None


async def test_without_a_vocabulary_there_are_no_grammars(toy_spec):
    engine = await AsyncEngine.start(replace(toy_spec(), vocabulary=None), EngineConfig(**BASE, device="cpu"))
    with pytest.raises(GrammarError, match="its ModelSpec has no vocabulary"):
        await engine.compile(REGEX)
    with pytest.raises(RequestError, match="its ModelSpec has no vocabulary") as caught:
        await collect(engine, request("a", [1], REGEX))
    assert caught.value.field == "grammar"
    await engine.stop()
    with pytest.raises(EngineDeadError):
        await engine.compile(REGEX)


async def test_the_same_through_the_wire(toy_spec, compiler, oracle):
    engine = await EngineClient.launch(toy_spec(), EngineConfig(**BASE, device="cpu"))
    try:
        await asyncio.gather(engine.compile(JSON), engine.compile(REGEX))
        assert await engine.compile(XML) == {"#/format/json_schema": XML_TYPES}
        with pytest.raises(GrammarError, match="^uniqueItems at #/uniqueItems ") as caught:
            await engine.compile(GrammarSpec("json_schema", '{"type": "array", "uniqueItems": true}'))
        assert (caught.value.place, caught.value.code) == ("#/uniqueItems", "unsupported_schema")
        bad = GrammarSpec("regex", "((")
        with pytest.raises(GrammarError, match="parenthesis"):
            await engine.compile(bad)
        with pytest.raises(GrammarError, match="parenthesis"):
            await collect(engine, request("bad", [1], bad))
        free = request("f", [5, 6], None, temperature=0, ignore_eos=True)
        alone = oracle([5, 6], OUTPUT)
        end = next(token for token in range(toy_model.VOCAB) if token not in alone)
        cut = request("c", [5, 6], None, temperature=0, max_tokens=11, ignore_eos=True, budget=Budget(10, (end,)))
        assert tokens_of(await collect(engine, cut)) == [*alone[:10], end]
        work = [request(f"h{index}", [index], spec, seed=index) for index, spec in enumerate([*CHECKS] * 2)]
        found, *answers = await asyncio.gather(collect(engine, free), *(collect(engine, each) for each in work))
        assert tokens_of(found) == alone
        for asked, outputs in zip(work, answers, strict=True):
            check(compiler, asked.sampling.grammar, outputs)
        compiling = asyncio.create_task(engine.compile(SLOW))
        await asyncio.sleep(0.1)
    finally:
        await engine.stop()
    with pytest.raises(EngineDeadError):
        await compiling
