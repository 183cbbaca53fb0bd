import asyncio
import json
import math
from collections import deque
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from nanovllm_server.bench import bench_cli
from nanovllm_server.bench.client import TimedAnswer
from nanovllm_server.bench.conversations import conversation_runner
from nanovllm_server.bench.conversations.conversation_flags import make_options
from nanovllm_server.bench.conversations.conversation_runner import Repetition
from nanovllm_server.bench.conversations.conversation_sizes import CASE_NAMES, THINK_TIMES, ConversationSizes
from nanovllm_server.bench.flags import DEFAULT_URL, build_parser
from nanovllm_server.bench.server_cases.case_client import CaseClient
from nanovllm_server.bench.server_cases.case_command import CaseOptions, measure
from nanovllm_server.bench.server_cases.case_results import CaseResult
from nanovllm_server.bench.server_cases.prompt_texts import Message

SIZE_FLAGS = [
    "--first-len=200",
    "--turn-len=60",
    "--output-len=16",
    "--think-time-s=0.02",
    "--concurrency=2",
    "--conversations=4",
    "--turns=3",
    "--cold-prompts=2",
    "--burst=5",
]
# Numbers of requests of the cases `returns` and `burst`: warm-up requests + turns + cold prompts.
NUM_REQUESTS = [2 + 4 * 3 + 2 * 2, 2 + 5 * 2 + 5]


def count_common_prefix_tokens(prompt: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), len(other))


def parse_options(*arguments: str) -> CaseOptions[ConversationSizes]:
    return make_options(build_parser().parse_args(["conversations", *arguments, *SIZE_FLAGS]), DEFAULT_URL, None)


@pytest.fixture
def cached_prompts(engine, monkeypatch) -> deque[list[int]]:
    """Makes the engine cache all prompts."""
    engine.endless, engine.delay = True, 0.0005
    cached_prompts: deque[list[int]] = deque()

    def count_cached_tokens(request) -> int:
        prompt = request.prompt_ids.tolist()
        num_cached = max((count_common_prefix_tokens(prompt, cached) for cached in cached_prompts), default=0)
        cached_prompts.append(prompt)
        return num_cached

    monkeypatch.setattr(engine, "count_cached_tokens", count_cached_tokens)
    return cached_prompts


@pytest.fixture
def options(url, cached_prompts) -> CaseOptions[ConversationSizes]:
    return parse_options(f"{url}/v1", "--seed=1")


@pytest.fixture
def sent_prompts(monkeypatch) -> list[list[Message]]:
    sent_prompts: list[list[Message]] = []
    send = CaseClient.send

    async def record(client, messages, max_tokens):
        sent_prompts.append(messages)
        return await send(client, messages, max_tokens)

    monkeypatch.setattr(CaseClient, "send", record)
    return sent_prompts


async def test_each_case_reports_its_figures(options):
    (result,) = await measure(options)
    assert tuple(case.case for case in result.case_results) == CASE_NAMES
    assert [case.num_requests for case in result.case_results] == NUM_REQUESTS
    returns, burst = result.case_results
    assert {kind: len(ttfts) for kind, ttfts in returns.ttfts_ms.items()} == {"first": 4, "returning": 8, "cold": 4}
    assert {kind: len(ttfts) for kind, ttfts in burst.ttfts_ms.items()} == {"first": 5, "returning": 5, "cold": 5}
    for case in result.case_results:
        figures = case.figures
        assert case.errors == case.warnings == []
        assert not any(math.isnan(figure) for figure in figures.values())
        for kind in ("first", "returning", "cold"):
            percentiles = [figures[f"{kind}_ttft_{name}_ms"] for name in ("p50", "p90", "p99", "max")]
            assert percentiles == sorted(percentiles)
        assert figures["cold_over_returning_ttft_p50"] == figures["cold_ttft_p50_ms"] / figures["returning_ttft_p50_ms"]
        assert figures["returning_cached_percent"] == pytest.approx(figures["returning_history_percent"], abs=3)
        assert figures["output_tokens_per_second"] > 0
    assert burst.figures["returning_prompt_tokens"] == pytest.approx(200 + 16 + 60, rel=0.15)
    assert burst.figures["returning_history_percent"] == pytest.approx(100 * 200 / (200 + 16 + 60), rel=0.15)


async def test_returning_turns_append_an_answer_and_a_message(options, sent_prompts):
    await measure(replace(options, cases=("burst",)))
    # The first two prompts belong to the warm-up.
    first, returning = sent_prompts[2:7], sent_prompts[7:12]
    for prompt, next_prompt in zip(first, returning, strict=True):
        assert [message["role"] for message in next_prompt] == ["user", "assistant", "user"]
        assert next_prompt[:1] == prompt


async def test_cold_prompts_have_the_lengths_of_returning_turns_and_new_texts(options, sent_prompts):
    await measure(replace(options, cases=("returns",)))
    traffic, cold = sent_prompts[2:14], sent_prompts[14:]
    assert [len(prompt) for prompt in cold] == [3, 3, 5, 5]
    assert len({prompt[0]["content"] for prompt in traffic}) == 4
    assert len({prompt[0]["content"] for prompt in [*traffic, *cold]}) == 4 + 4

    def count_words(prompt: list[Message]) -> list[int]:
        return [len(message["content"].split()) for message in prompt]

    assert {*map(tuple, map(count_words, cold))} == {
        tuple(count_words(prompt)) for prompt in traffic if len(prompt) > 1
    }


async def test_seed_determines_texts_and_pauses(options, url, sent_prompts, monkeypatch):
    drawn_s: list[float] = []

    def draw(random: Random, mean_s: float) -> float:
        drawn_s.append(random.expovariate(1 / mean_s))
        return drawn_s[-1]

    monkeypatch.setitem(THINK_TIMES, "exponential", draw)

    async def record(*arguments: str) -> tuple[list[str], list[float]]:
        sent_prompts.clear()
        drawn_s.clear()
        await measure(parse_options(f"{url}/v1", *arguments))
        return sorted(map(str, sent_prompts)), [*drawn_s]

    texts, pauses_s = await record("--seed=7")
    assert len(set(pauses_s)) == 4 * 3
    assert await record("--seed=7") == (texts, pauses_s)
    assert await record() != (texts, pauses_s)


async def test_only_a_burst_exceeds_the_concurrency(options, engine):
    num_active: list[int] = []
    submit = engine._submit

    def submit_and_count(key, request) -> None:
        submit(key, request)
        num_active.append(engine.num_active)

    engine._submit = submit_and_count
    engine.delay = 0.3
    sizes = replace(options.settings.sizes, output_len=1)
    await measure(replace(options, settings=replace(options.settings, sizes=sizes)))
    num_before_returning_burst = 3 + NUM_REQUESTS[0] + 2 + 5
    assert max(num_active[:num_before_returning_burst]) == 2
    returning = num_active[num_before_returning_burst : num_before_returning_burst + 5]
    cold = num_active[num_before_returning_burst + 5 :]
    assert (max(returning), max(cold)) == (5, 5)


async def test_conversations_pause_before_each_turn(options, monkeypatch):
    pauses_s: list[float] = []
    sleep = asyncio.sleep

    async def record_sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)
        await sleep(0)

    monkeypatch.setattr(conversation_runner.asyncio, "sleep", record_sleep)
    sizes = replace(options.settings.sizes, think_distribution="constant", think_time_s=77.0)
    await measure(replace(options, settings=replace(options.settings, sizes=sizes)))
    assert pauses_s.count(77.0) == 4 * 3 + 1


@pytest.mark.parametrize("distribution", THINK_TIMES)
def test_think_times_have_the_given_mean(distribution):
    random = Random(0)
    times_s = [THINK_TIMES[distribution](random, 10.0) for _ in range(4000)]
    assert fmean(times_s) == pytest.approx(10.0, rel=0.05)
    assert min(times_s) >= 0
    assert (len(set(times_s)) == 1) == (distribution == "constant")


async def test_missing_cached_tokens_are_a_warning(options, cached_prompts, engine, monkeypatch):
    monkeypatch.setattr(engine, "count_cached_tokens", lambda request: 0)
    (result,) = await measure(options)
    for case in result.case_results:
        assert case.figures["returning_cached_percent"] == 0
        assert case.warnings == ["no returning turn has cached tokens, or the server does not report cached_tokens"]


async def test_cold_prompts_that_the_server_has_cached_are_a_warning(options, url):
    first, second = await measure(parse_options(f"{url}/v1", f"again={url}/v1"))
    assert all(case.warnings == [] for case in first.case_results)
    for case in second.case_results:
        assert case.warnings == ["the server had cached cold prompts: restart the server, or choose another --seed"]


async def test_failed_requests_are_counted_and_set_the_exit_status(options, url, service, tmp_path, capsys):
    service.admission.capacity = 2
    file = tmp_path / "figures.json"
    arguments = ["conversations", f"ours={url}/v1", f"--json={file}", *SIZE_FLAGS]
    assert await asyncio.to_thread(bench_cli.main, arguments) == 1
    figures = json.loads(file.read_bytes())
    assert (figures["benchmark"], figures["sizes"]["think_time_s"]) == ("conversations", 0.02)
    returns, burst = figures["servers"][0]["cases"]
    assert returns["errors"] == []
    assert len(burst["errors"]) > 0
    assert all("status 429" in error for error in burst["errors"])
    captured = capsys.readouterr()
    assert f"{len(burst['errors'])} requests failed: the results leave these requests out" in captured.err
    assert ["burst", "failed", str(len(burst["errors"]))] in [line.split() for line in captured.out.splitlines()]


def answer(ttft_s: float, prompt_tokens: int, cached_tokens: int) -> TimedAnswer:
    return TimedAnswer(1.0, (1.0 + ttft_s,), 3.0, prompt_tokens, cached_tokens, output_tokens=10)


def test_turn_after_a_failed_turn_does_not_count_as_returning():
    result = CaseResult("returns")
    conversation = [answer(1.0, 100, 0), answer(0.5, 200, 90), None, answer(1.5, 400, 0)]
    failed = [None, answer(1.6, 200, 0)]
    repetition = Repetition([conversation, failed], cold=[answer(1.0, 200, 0), None], timed=[*conversation, *failed])
    conversation_runner._summarize(result, [repetition])
    assert result.ttfts_ms == {"first": [1000], "returning": [500], "cold": [1000]}
    assert result.figures["cold_over_returning_ttft_p50"] == 2
    assert result.figures["returning_history_percent"] == 50
    assert result.figures["returning_cached_percent"] == 45
    assert result.figures["output_tokens_per_second"] == 4 * 10 / 2


def test_case_without_answers_has_empty_figures():
    result = CaseResult("burst")
    conversation_runner._summarize(result, [Repetition([[None, None]], cold=[None], timed=[None])])
    assert all(math.isnan(figure) for figure in result.figures.values())
    assert result.warnings == []
