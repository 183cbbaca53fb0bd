import asyncio

import pytest
import toy_model

from nanovllm_core import AsyncEngine, EngineConfig, GrammarError, GrammarSpec, ReasoningBudget, Request, SamplingParams

PIECES = toy_model.toy_vocabulary().tokens
A, B = PIECES.index(b"a"), PIECES.index(b"b")
ALLOWED = (3, 20, 21, 40, 66, 96)
OUTPUT_LEN = 30
BASE = {"device": "cpu", "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 256, "depth": 2}
CONFIGS = {
    "plain": {},
    "depth 1": {"depth": 1},
    "chunked, no prefix cache": {"max_num_batched_tokens": 24, "prefix_caching": False},
    "preempted": {"num_blocks": 9, "max_model_len": 120},
}


@pytest.fixture
async def engine(toy_spec, vetter, monkeypatch):
    vetter.use(monkeypatch)
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE))
    yield engine
    await engine.stop()


def make_request(name: str, prompt: list[int], **sampling) -> Request:
    options = {"temperature": 0.0, "max_tokens": OUTPUT_LEN, "ignore_eos": True, **sampling}
    return Request(name, prompt, SamplingParams(**options))


async def collect(engine, request: Request) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
async def test_outputs_equal_those_with_biases_against_all_other_tokens(toy_spec, oracle, settings):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**{**BASE, **settings}))
    biases = {token: -100.0 for token in range(toy_model.VOCAB) if token not in ALLOWED}
    prompts = [[seed, *range(30 + seed)] for seed in range(6)]
    kinds = [{}, {"temperature": 1.5, "top_p": 0.9}, {"frequency_penalty": 0.5, "logprobs": 1}]

    async def ask(name: str, **options) -> list[list[int]]:
        requests = [
            make_request(f"{name}{index}", prompt, seed=index, **kinds[index % len(kinds)], **options)
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*(collect(engine, each) for each in requests))

    try:
        free = asyncio.gather(*(collect(engine, make_request(f"free{index}", prompts[index])) for index in range(6)))
        allowed, biased = await asyncio.gather(
            ask("allowed", allowed_token_ids=ALLOWED), ask("biased", logit_bias=biases)
        )
        assert allowed == biased
        assert {token for tokens in allowed for token in tokens} <= {*ALLOWED}
        assert await free == [oracle(prompt, OUTPUT_LEN) for prompt in prompts]
        assert (engine.stats.num_preemptions > 0) == (settings.get("num_blocks") == 9)
    finally:
        await engine.stop()


async def test_output_ends_only_if_its_end_token_is_allowed(engine):
    ending = await collect(engine, make_request("a", [1, 2], allowed_token_ids=(toy_model.EOS,), ignore_eos=False))
    assert ending == [toy_model.EOS]
    endless = await collect(engine, make_request("b", [1, 2], allowed_token_ids=(A, B), ignore_eos=False))
    assert len(endless) == OUTPUT_LEN


async def test_allowed_tokens_override_biases_and_bans(engine):
    options = {"logit_bias": {A: -100.0, 7: 100.0}, "forbidden_sequences": ((A,),), "stop_token_ids": (A,)}
    tokens = await collect(engine, make_request("a", [1, 2], allowed_token_ids=(A,), min_tokens=4, **options))
    assert tokens == [A]


async def test_allowed_tokens_narrow_a_grammar_but_keep_its_end_token(engine):
    grammar = GrammarSpec("regex", "[ab]{5}")
    assert await collect(engine, make_request("a", [1, 2], grammar=grammar, allowed_token_ids=(A,))) == [
        *[A] * 5,
        toy_model.EOS,
    ]


async def test_grammar_without_any_allowed_token_is_an_error_that_names_the_field(engine, oracle):
    other = asyncio.create_task(collect(engine, make_request("other", [1, 2, 3])))
    narrow = make_request("a", [1, 2], grammar=GrammarSpec("regex", "aab"), allowed_token_ids=(A,))
    with pytest.raises(GrammarError, match="allowed_token_ids has no token that the grammar allows"):
        await collect(engine, narrow)
    assert await other == oracle([1, 2, 3], OUTPUT_LEN)
    assert not engine._loop._open_requests


async def test_reasoning_budget_is_dropped_if_its_end_tokens_are_not_allowed(engine):
    budget = ReasoningBudget(3, (B,))
    closed = await collect(engine, make_request("a", [1, 2], allowed_token_ids=(A, B), reasoning_budget=budget))
    assert closed[3] == B or B in closed[:3]
    dropped = await collect(engine, make_request("b", [1, 2], allowed_token_ids=(A,), reasoning_budget=budget))
    assert dropped == [A] * OUTPUT_LEN
