import asyncio
from dataclasses import replace

import pytest
import sampled_answers
from sampled_answers import SAMPLINGS, answer_all, collect, compare_answers
from toy_model import toy_spec
from toy_recurrent import recurrent_spec

from nanovllm_core import AsyncEngine, ConfigError, EngineConfig, ModelSpec, Request, RequestOutput, SamplingParams

pytestmark = pytest.mark.background

CONFIG = EngineConfig(device="cpu", num_blocks=64, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=48)
# The last two prompts contain repetitions, so that n-gram drafts exist from the first token on.
PROMPTS = [*sampled_answers.PROMPTS[:2], [11, 12, 13] * 6, [*range(20, 32), *range(20, 30)]]


@pytest.fixture(scope="module")
def expected(vetter) -> dict[str, list[RequestOutput]]:
    with pytest.MonkeyPatch.context() as patch:
        vetter.use(patch)
        return asyncio.run(answer_all(CONFIG, PROMPTS))


@pytest.mark.parametrize(("num_blocks", "depth", "num_drafts"), [(18, 2, 3), (64, 2, 15), (64, 1, 4)])
def test_ngram_drafts_change_no_answer(num_blocks, depth, num_drafts, expected, vetter, always_drafts, monkeypatch):
    vetter.use(monkeypatch)
    config = replace(CONFIG, num_blocks=num_blocks, depth=depth, speculate="ngram", num_speculative_tokens=num_drafts)
    found = asyncio.run(answer_all(config, PROMPTS))
    compare_answers(found, expected)
    finals = [outputs[-1] for outputs in found.values()]
    assert sum(final.num_accepted_drafts for final in finals) > 20
    assert sum(final.num_rejected_drafts for final in finals) > 20


async def test_only_drafts_in_the_output_count_as_accepted(oracle, always_drafts):
    answer = oracle([7, 8, 9], 16)
    stop_token = answer[5]
    sampling = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=(stop_token,), ignore_eos=True)
    config = replace(CONFIG, depth=1, speculate="ngram", num_speculative_tokens=8)
    engine = await AsyncEngine.start(toy_spec(), config)
    try:
        request = Request("r", [7, 8, 9], sampling, prediction=answer)
        *_, final = [output async for output in engine.generate(request)]
        assert (final.num_output_tokens, final.stop_token) == (6, stop_token)
        # N-gram drafts begin after 3 tokens. One step verifies 8 correct drafts, and the third draft is the stop token.
        assert (final.num_accepted_drafts, final.num_rejected_drafts) == (3, 5)
    finally:
        await engine.stop()


WITH_DRAFT_MODEL, WITH_MTP_HEAD = replace(toy_spec(), draft=toy_spec("small")), toy_spec("headed")
MODEL_CASES = {
    "same model": (replace(toy_spec(), draft=toy_spec()), {"num_speculative_tokens": 4}),
    "draft model, preempted": (WITH_DRAFT_MODEL, {"num_blocks": 18, "num_speculative_tokens": 3}),
    "draft model, no prefix cache": (
        WITH_DRAFT_MODEL,
        {"depth": 1, "num_speculative_tokens": 15, "prefix_caching": False},
    ),
    "head": (WITH_MTP_HEAD, {"num_speculative_tokens": 4}),
    "head, preempted": (WITH_MTP_HEAD, {"num_blocks": 18, "num_speculative_tokens": 2}),
    "head, two ranks": (WITH_MTP_HEAD, {"depth": 1, "num_speculative_tokens": 4, "tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("case", MODEL_CASES)
def test_drafts_of_models_and_heads_change_no_answer(case, expected, vetter, always_drafts, monkeypatch):
    vetter.use(monkeypatch)
    spec, settings = MODEL_CASES[case]
    method = "mtp" if spec.draft is None else "draft"
    found = asyncio.run(answer_all(replace(CONFIG, **{"speculate": method, "depth": 2} | settings), PROMPTS, spec))
    compare_answers(found, expected)
    finals = [outputs[-1] for outputs in found.values()]
    assert sum(final.num_accepted_drafts for final in finals) > 5
    assert sum(final.num_rejected_drafts for final in finals) > 50


async def count_drafts(config: EngineConfig, spec: ModelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of verified and accepted drafts by position."""
    engine = await AsyncEngine.start(spec, config)

    async def answer(index: int, sampling: SamplingParams) -> None:
        # Later prompts share a prefix with earlier prompts, so that blocks come from the prefix cache.
        await asyncio.sleep(0.1 * index)
        prompt = [*range(20 + index % 8, 62 + index % 8), index % 3]
        await collect(engine, prompt, sampling, f"r{index}")

    try:
        greedy = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        filtered = replace(SAMPLINGS["filtered"], max_tokens=80, logit_bias={11: 1.0})
        drawn = replace(SAMPLINGS["drawn"], max_tokens=80)
        samplings = [greedy, replace(drawn, seed=8), filtered, drawn] * 4
        await asyncio.gather(*(answer(index, sampling) for index, sampling in enumerate(samplings)))
        return engine.stats.verified_drafts_by_position, engine.stats.accepted_drafts_by_position
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    "settings", [{}, {"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 2}, {"num_speculative_tokens": 15}]
)
async def test_a_model_accepts_its_own_drafts(settings, always_drafts):
    limits = {"max_num_batched_tokens": 64, "num_speculative_tokens": 4}
    config = replace(CONFIG, speculate="draft", **limits | settings)
    verified, accepted = await count_drafts(config, replace(toy_spec(), draft=toy_spec()))
    assert min(verified) > 5
    assert sum(accepted) / sum(verified) > 0.99


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (None, "no draft model is named: set --draft-model"),
        (replace(toy_spec(), name="other", vocab_size=90), "--draft-model other has 90 token ids, .* toy has 97"),
        (recurrent_spec(), "the draft model has recurrent layers"),
    ],
)
async def test_unusable_draft_model_is_refused(draft, reason):
    with pytest.raises(ConfigError, match=reason):
        await AsyncEngine.start(replace(toy_spec(), draft=draft), replace(CONFIG, speculate="draft"))


async def test_heads_that_the_model_lacks_are_refused():
    with pytest.raises(ConfigError, match="speculate is 'mtp', but the checkpoint has no heads"):
        await AsyncEngine.start(toy_spec(), replace(CONFIG, speculate="mtp"))
