import asyncio
import random
import threading
from dataclasses import replace

import pytest
import toy_model
from grammars import CHECKS, EBNF, JSON, REGEX, SLOW, TAG, XML, XML_TYPES, text_of, toy_compiler

from nanovllm_core import (
    AsyncEngine,
    EngineClient,
    EngineConfig,
    EngineDeadError,
    GrammarError,
    GrammarSpec,
    ReasoningBudget,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from nanovllm_core.execution import row_constraint
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
    "steps with prompts in pieces": {"graph_mode": "piecewise", "max_num_batched_tokens": 80},
    "not compiled": {"compile": False},
}
SAMPLING_OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.7, "min_tokens": 30},
    {"temperature": 0.8, "ignore_eos": True, "frequency_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": {toy_model.EOS: -100.0, 3: 50.0}, "logprobs": 2},
    {"temperature": 1.0, "allowed_token_ids": tuple({*range(toy_model.VOCAB)} - {toy_model.EOS})},
]
OUTPUT_LEN = 60


@pytest.fixture(scope="module")
def compiler():
    return toy_compiler()


@pytest.fixture
async def engine(toy_spec, vetter, monkeypatch):
    vetter.use(monkeypatch)
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE, device="cpu"))
    yield engine
    await engine.stop()


def make_request(name: str, prompt: list[int], grammar: GrammarSpec | None, **sampling) -> Request:
    return Request(name, prompt, SamplingParams(**{"max_tokens": OUTPUT_LEN, "grammar": grammar, **sampling}))


async def collect(engine, request: Request, max_tokens: int = 1000) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    stream = engine.generate(request)
    async for output in stream:
        outputs.append(output)
        if output.num_output_tokens >= max_tokens:
            break
    await stream.aclose()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def check_answer(compiler, spec: GrammarSpec, outputs: list[RequestOutput]) -> None:
    tokens = tokens_of(outputs)
    if outputs[-1].finish_reason == "stop":
        assert outputs[-1].stop_token == toy_model.EOS
        assert tokens.index(toy_model.EOS) == len(tokens) - 1
        assert CHECKS[spec](text_of(tokens)), text_of(tokens)
        return
    matcher = compiler.compile(spec).start()
    assert all(matcher.accept(token) for token in tokens), text_of(tokens)


async def serve(toy_spec, compiler, oracle, device: str, settings: dict) -> tuple[int, int]:
    """Returns the number of complete answers and the number of preemptions."""
    config = EngineConfig(**{**BASE, **settings, "device": device}, forbid_sync=device == "cuda")
    engine = await AsyncEngine.start(toy_spec(), config)
    rng, num_complete = random.Random(3), 0

    async def run_constrained(index: int, spec: GrammarSpec) -> None:
        nonlocal num_complete
        await asyncio.sleep(rng.random() * 0.1)
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 60))]
        max_tokens = rng.choice([1, 7, 1000, 1000, 1000])
        constrained_request = make_request(
            f"h{index}", prompt, spec, seed=index, **SAMPLING_OPTIONS[index % len(SAMPLING_OPTIONS)]
        )
        outputs = await collect(engine, constrained_request, max_tokens)
        num_complete += outputs[-1].finish_reason == "stop"
        check_answer(compiler, spec, outputs)

    async def run_unconstrained(index: int) -> None:
        await asyncio.sleep(rng.random() * 0.1)
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 60))]
        outputs = await collect(engine, make_request(f"f{index}", prompt, None, temperature=0, ignore_eos=True))
        assert tokens_of(outputs) == oracle(prompt, OUTPUT_LEN)

    try:
        work = [run_constrained(index, spec) for index, spec in enumerate([*CHECKS] * 6)]
        await asyncio.gather(*work, *map(run_unconstrained, range(8)))
        async with asyncio.timeout(60):
            while engine.stats.num_requests_running or engine.stats.num_free_blocks < engine.stats.num_blocks:
                await asyncio.sleep(0.01)
        return num_complete, engine.stats.num_preemptions
    finally:
        await engine.stop()


@pytest.mark.parametrize("name", CONFIGS)
async def test_answers_match_grammars_and_other_requests_are_unchanged(
    name, toy_spec, compiler, oracle, vetter, monkeypatch
):
    vetter.use(monkeypatch)
    num_complete, num_preemptions = await serve(toy_spec, compiler, oracle, "cpu", CONFIGS[name])
    assert num_complete >= 8
    assert (num_preemptions > 0) == name.startswith("preempted")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CONFIGS, *GPU_CONFIGS])
async def test_answers_match_on_a_gpu(name, toy_spec, compiler, oracle, vetter, monkeypatch):
    vetter.use(monkeypatch)
    num_complete, _ = await serve(toy_spec, compiler, oracle, "cuda", {**CONFIGS, **GPU_CONFIGS}[name])
    assert num_complete >= 8


async def test_a_seed_gives_the_same_answer_in_any_batch(engine):
    async def ask(name: str, seed: int) -> list[int]:
        return tokens_of(await collect(engine, make_request(name, [1, 2, 3], JSON, seed=seed)))

    alone = await ask("a", 7)
    other_requests = (collect(engine, make_request(f"c{index}", [index], REGEX)) for index in range(3))
    together, other, *_ = await asyncio.gather(ask("b", 7), ask("c", 8), *other_requests)
    assert together == alone
    assert other != alone


async def test_logprobs_are_of_the_models_own_distribution(engine):
    free, constrained = [
        (await collect(engine, make_request(name, [1, 2], grammar, temperature=0, logprobs=3, max_tokens=1)))[0]
        for name, grammar in (("a", None), ("b", REGEX))
    ]
    assert constrained.logprobs[0].top == free.logprobs[0].top
    assert constrained.logprobs[0].logprob < free.logprobs[0].logprob


async def test_the_end_token_is_sampled_if_the_grammar_allows_no_other(engine):
    options_against_end = {"min_tokens": 40, "ignore_eos": True, "logit_bias": {toy_model.EOS: -100.0}}
    outputs = await collect(engine, make_request("a", [1, 2], GrammarSpec("regex", "ab"), **options_against_end))
    assert text_of(tokens_of(outputs)) == b"ab"
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", toy_model.EOS)
    outputs = await collect(
        engine, make_request("b", [1, 2], GrammarSpec("regex", "(ab)+"), min_tokens=20, temperature=0)
    )
    assert len(tokens_of(outputs)) > 20


async def test_stop_token_ids_stop_where_the_grammar_allows_them(engine):
    pieces = toy_model.toy_vocabulary().tokens
    stop = pieces.index(b",")
    outputs = await collect(engine, make_request("a", [1, 2], GrammarSpec("regex", "a,b,"), stop_token_ids=(stop,)))
    assert text_of(tokens_of(outputs)) == b"a,"
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", stop)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
async def test_a_reasoning_budget_closes_overlong_reasoning(max_steps_in_flight, toy_spec, oracle):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, "depth": max_steps_in_flight}, device="cpu"))
    prompt = [7, 8, 9]
    free = oracle(prompt, 40)

    async def ask(name: str, budget: ReasoningBudget) -> list[int]:
        budget_request = make_request(
            name, prompt, None, temperature=0, ignore_eos=True, max_tokens=40, reasoning_budget=budget
        )
        return tokens_of(await collect(engine, budget_request))

    absent = [token for token in range(toy_model.VOCAB) if token not in free][:3]
    try:
        forced, completed, early, late, at_once = await asyncio.gather(
            ask("a", ReasoningBudget(10, tuple(absent))),
            ask("b", ReasoningBudget(10, (free[9], *absent))),
            ask("c", ReasoningBudget(10, tuple(free[3:6]))),
            ask("d", ReasoningBudget(40, tuple(absent))),
            ask("e", ReasoningBudget(0, (absent[0],))),
        )
    finally:
        await engine.stop()
    assert forced[:13] == [*free[:10], *absent]
    assert forced[13:] == oracle([*prompt, *forced[:13]], 27)
    assert completed[:13] == [*free[:10], *absent]
    assert early == free
    assert late == free
    assert at_once == [absent[0], *oracle([*prompt, absent[0]], 39)]


async def test_a_reasoning_budget_follows_the_grammar(engine, compiler):
    end = tuple(toy_model.toy_vocabulary().tokens.index(piece) for piece in (b"</t", b"hink>"))
    requests = [
        make_request(f"r{seed}", [seed], TAG, seed=seed, reasoning_budget=ReasoningBudget(12, end), max_tokens=120)
        for seed in range(6)
    ]
    answers = await asyncio.gather(*(collect(engine, request) for request in requests))
    for outputs in answers:
        check_answer(compiler, TAG, outputs)
        thought, tag, _ = text_of(tokens_of(outputs)).partition(b"</think>")
        assert tag
        assert len(thought) <= 3 * 12
    assert any(outputs[-1].finish_reason == "stop" for outputs in answers)
    # This grammar does not allow the end of the reasoning, so the budget is dropped.
    outputs = await collect(engine, make_request("b", [1], REGEX, reasoning_budget=ReasoningBudget(2, end)))
    check_answer(compiler, REGEX, outputs)


async def test_hostile_grammars_fail_in_time_and_delay_no_other_request(monkeypatch, toy_spec, oracle):
    vet, may_end = vetting.Vetter.vet, threading.Event()

    def end_late(vetter, spec):
        """On a busy machine, the vetting process may refuse the grammar before other requests are answered."""
        try:
            return vet(vetter, spec)
        finally:
            assert spec != SLOW or may_end.wait(60)

    monkeypatch.setattr(vetting, "MAX_SECONDS", 2.0)
    monkeypatch.setattr(vetting.Vetter, "vet", end_late)
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE, device="cpu"))
    try:
        await engine.compile_grammar(REGEX)
        slow = [asyncio.create_task(collect(engine, make_request(f"s{i}", [1], SLOW))) for i in range(2)]
        prompt = [3, 4]
        for index in range(4):
            outputs = await collect(engine, make_request(f"f{index}", prompt, None, temperature=0, ignore_eos=True))
            assert tokens_of(outputs) == oracle(prompt, OUTPUT_LEN)
            assert engine.stats.num_requests_waiting == len(slow)
        may_end.set()
        for task in slow:
            with pytest.raises(GrammarError, match="takes more than 2 s"):
                await task
        assert engine.stats.num_requests_waiting == 0
    finally:
        may_end.set()
        await engine.stop()


async def test_a_request_waits_for_its_grammar_and_can_be_aborted_meanwhile(engine):
    stream = engine.generate(make_request("a", [1], SLOW))
    first_output = asyncio.create_task(anext(stream))
    async with asyncio.timeout(60):
        while not engine.stats.num_requests_waiting:
            await asyncio.sleep(0.01)
    assert not first_output.done()
    first_output.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first_output
    outputs = await collect(engine, make_request("b", [1], REGEX))
    assert CHECKS[REGEX](text_of(tokens_of(outputs)))
    assert engine.stats.num_requests_waiting == 0


async def test_failing_grammar_fails_only_its_request(engine, monkeypatch, oracle):
    free = asyncio.create_task(collect(engine, make_request("f", [5, 6], None, temperature=0, ignore_eos=True)))
    # The vocabulary has no token for the euro sign.
    with pytest.raises(GrammarError, match="allows no token of the vocabulary"):
        await collect(engine, make_request("a", [1], GrammarSpec("regex", "ab€")))
    monkeypatch.setattr(row_constraint, "_MAX_MATCH_S", 0.0)
    monkeypatch.setattr(row_constraint, "_MAX_MATCH_S_PER_TOKEN", 0.0)
    with pytest.raises(GrammarError, match="takes too long to follow"):
        await collect(engine, make_request("b", [1], EBNF))
    assert tokens_of(await free) == oracle([5, 6], OUTPUT_LEN)
    assert engine.death_reason is None


async def test_grammars_need_a_vocabulary(toy_spec):
    engine = await AsyncEngine.start(replace(toy_spec(), vocabulary=None), EngineConfig(**BASE, device="cpu"))
    with pytest.raises(GrammarError, match="its ModelSpec has no vocabulary"):
        await engine.compile_grammar(REGEX)
    with pytest.raises(RequestError, match="its ModelSpec has no vocabulary") as caught:
        await collect(engine, make_request("a", [1], REGEX))
    assert caught.value.field == "grammar"
    await engine.stop()
    with pytest.raises(EngineDeadError):
        await engine.compile_grammar(REGEX)


async def test_an_engine_process_compiles_and_follows_grammars(toy_spec, compiler, oracle):
    engine = await EngineClient.launch(toy_spec(), EngineConfig(**BASE, device="cpu"))
    try:
        await asyncio.gather(engine.compile_grammar(JSON), engine.compile_grammar(REGEX))
        assert await engine.compile_grammar(XML) == {"#/format/json_schema": XML_TYPES}
        with pytest.raises(GrammarError, match="^uniqueItems at #/uniqueItems ") as caught:
            await engine.compile_grammar(GrammarSpec("json_schema", '{"type": "array", "uniqueItems": true}'))
        assert (caught.value.place, caught.value.code) == ("#/uniqueItems", "unsupported_schema")
        bad = GrammarSpec("regex", "((")
        with pytest.raises(GrammarError, match=r"it has a \( without \)"):
            await engine.compile_grammar(bad)
        with pytest.raises(GrammarError, match=r"it has a \( without \)"):
            await collect(engine, make_request("bad", [1], bad))
        free = make_request("f", [5, 6], None, temperature=0, ignore_eos=True)
        alone = oracle([5, 6], OUTPUT_LEN)
        end = next(token for token in range(toy_model.VOCAB) if token not in alone)
        cut = make_request(
            "c",
            [5, 6],
            None,
            temperature=0,
            max_tokens=11,
            ignore_eos=True,
            reasoning_budget=ReasoningBudget(10, (end,)),
        )
        assert tokens_of(await collect(engine, cut)) == [*alone[:10], end]
        requests = [make_request(f"h{index}", [index], spec, seed=index) for index, spec in enumerate([*CHECKS] * 2)]
        found, *answers = await asyncio.gather(collect(engine, free), *(collect(engine, each) for each in requests))
        assert tokens_of(found) == alone
        for request, outputs in zip(requests, answers, strict=True):
            check_answer(compiler, request.sampling.grammar, outputs)
        compiling = asyncio.create_task(engine.compile_grammar(SLOW))
        await asyncio.sleep(0.1)
    finally:
        await engine.stop()
    with pytest.raises(EngineDeadError):
        await compiling
