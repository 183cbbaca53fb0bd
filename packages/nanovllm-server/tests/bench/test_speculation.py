"""`speculation`: prompts, pairs of runs with a model of random weights, and summaries."""

from collections import Counter
from dataclasses import replace

import pytest

import nanovllm_models
from nanovllm_core import AsyncEngine, EngineConfig, RequestError
from nanovllm_server.bench.speculation.paired_runs import Difference, PairRunner, PromptRuns, RunPair, TimedRun
from nanovllm_server.bench.speculation.prompt_files import Prompt, read_prompts
from nanovllm_server.bench.speculation.speculation_command import make_tables, summarize_kinds, summarize_prompt

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12) * 4


def test_prompts_have_the_stated_numbers_and_lengths():
    prompts = read_prompts()
    assert Counter(prompt.kind for prompt in prompts) == {"summary": 20, "code edit": 20, "chat": 10}
    assert len({prompt.name for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 50
    for prompt in prompts:
        assert "===" not in prompt.text.splitlines()[0]
        if prompt.kind != "chat":
            assert 15 <= len(prompt.text.splitlines()) <= 60, prompt.name


def test_prompts_of_a_kind_are_evenly_spread():
    names = [prompt.name for prompt in read_prompts()]
    selected_prompts = read_prompts(4)
    assert [names.index(prompt.name) for prompt in selected_prompts] == [0, 5, 10, 15, 20, 25, 30, 35, 40, 42, 45, 47]


@pytest.fixture
async def pair_runner(config_only_model):
    """Runs pairs on a tiny model whose outputs repeat themselves."""
    spec = nanovllm_models.load(config_only_model, load_format="dummy")
    config = EngineConfig(device="cpu", cpu_cache_gib=0.05, speculate="ngram")
    plain = await AsyncEngine.start(spec, replace(config, speculate=None))
    drafted = await AsyncEngine.start(spec, config)
    yield PairRunner(plain, drafted, max_tokens=64)
    await plain.stop()
    await drafted.stop()


async def test_pair_has_equal_tokens_and_counts_drafts(pair_runner):
    for _ in range(2):  # The second pair runs in the other order.
        pair = await pair_runner.run_pair(PROMPT)
        assert pair.first_difference is None
        assert 2 <= len(pair.plain.token_ids) <= 64
        assert pair.plain.num_accepted == pair.plain.num_rejected == 0
        assert pair.drafted.num_accepted + pair.drafted.num_rejected > 0
        assert pair.ratio == pytest.approx(pair.drafted.tokens_per_s / pair.plain.tokens_per_s)
        assert await pair_runner.find_differences(PROMPT, [pair]) == []


async def test_difference_has_its_position_and_margin(pair_runner):
    pair = await pair_runner.run_pair(PROMPT)
    tokens = pair.plain.token_ids
    other_token = next(token for token in range(512) if token != tokens[3])
    changed = RunPair(pair.plain, replace(pair.drafted, token_ids=(*tokens[:3], other_token, *tokens[4:])))
    shorter = RunPair(pair.plain, replace(pair.drafted, token_ids=tokens[:5]))
    changed_difference, shorter_difference = await pair_runner.find_differences(PROMPT, [pair, changed, shorter])
    assert (changed_difference.round_index, changed_difference.position) == (1, 3)
    assert (changed_difference.token_without_drafts, changed_difference.token_with_drafts) == (tokens[3], other_token)
    assert changed_difference.margin is None or changed_difference.margin > 0
    assert shorter_difference == Difference(2, 5, tokens[5], None, None)


async def test_prompt_that_does_not_fit_is_refused(pair_runner):
    with pytest.raises(RequestError, match="max_tokens is 64"):
        pair_runner.check((5,) * 200)


def make_runs(*drafted_seconds: float, differences: tuple[Difference, ...] = ()) -> PromptRuns:
    tokens = tuple(range(11))
    plain = TimedRun(tokens, 1.0, 10, 0, 0)
    pairs = [RunPair(plain, TimedRun(tokens, seconds, 10, 4, 1)) for seconds in drafted_seconds]
    return PromptRuns(pairs, [*differences])


def test_figures_are_medians_of_rounds_and_prompts():
    difference = Difference(0, 7, 70, 71, 0.25)
    results = [
        summarize_prompt(Prompt("chat", "a", "A"), 20, make_runs(0.5, 0.4, 2.0)),
        summarize_prompt(Prompt("chat", "b", "B"), 20, make_runs(1.0, 1.0, 1.0, differences=(difference,))),
    ]
    first = results[0]
    assert (first.plain_rate, first.drafted_rate, first.ratio) == (10, 20, 2)
    assert (first.num_accepted, first.num_verified) == (12, 15)
    assert first.tokens_per_step == 33 / 21
    (kind,) = summarize_kinds(results)
    assert (kind.num_prompts, kind.median_ratio, kind.min_ratio, kind.max_ratio) == (2, 1.5, 1, 2)
    assert (kind.acceptance, kind.num_equal) == (0.8, 1)
    prompt_table, kind_table, difference_table = make_tables(results)
    assert [row[-1] for row in prompt_table] == ["equal", "yes", "no"]
    assert kind_table[1][:3] == ["chat", "2", "1.500"]
    assert difference_table[1] == ["b", "1", "7", "70", "71", "0.250000"]
    assert len(make_tables(results[:1])) == 2
