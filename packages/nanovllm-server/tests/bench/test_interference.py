"""`nanovllm-bench interference` over a real socket."""

import asyncio
import json
import math
import time
from dataclasses import replace

import pytest

from nanovllm_server.bench import cli
from nanovllm_server.bench.client import parse_base_url
from nanovllm_server.bench.interference import program
from nanovllm_server.bench.interference.chats import ENDED_EARLY, ChatClient, DecodeStreams, decoding
from nanovllm_server.bench.interference.flags import job_from
from nanovllm_server.bench.interference.program import InterferenceJob, table
from nanovllm_server.bench.interference.prompts import (
    TokenCosts,
    conversation,
    measure_token_costs,
    single_message,
    with_next_turn,
)
from nanovllm_server.bench.interference.sizes import CASES
from nanovllm_server.bench.report import BenchError

SIZES = [
    "--long-len=240",
    "--num-short=3",
    "--short-len=80",
    "--output-len=3",
    "--streams=3",
    "--stream-len=380",
    "--baseline-s=0.05",
    "--num-prompts=2",
    "--prompt-len=200",
    "--num-turns=2",
    "--conversations=2",
    "--conversation-len=240",
    "--message-len=60",
    "--turn-len=80",
    "--turn-streams=2",
    "--turn-interval-ms=10",
    "--repeat=2",
]
HELLO = [{"role": "user", "content": "Hello"}]


def make_job(*arguments: str) -> InterferenceJob:
    return job_from(cli.parser().parse_args(["interference", *arguments, *SIZES]), None)


def with_sizes(job: InterferenceJob, **sizes) -> InterferenceJob:
    return replace(job, settings=replace(job.settings, sizes=replace(job.settings.sizes, **sizes)))


@pytest.fixture
def job(url, engine) -> InterferenceJob:
    engine.endless, engine.delay, engine.num_cached_tokens = True, 0.002, 230
    return make_job(f"{url}/v1", "--seed=1")


@pytest.fixture
def client(url) -> ChatClient:
    return ChatClient(parse_base_url(f"{url}/v1", None), "scripted", temperature=0.0, timeout_s=5.0)


async def test_each_case_reports_its_figures(job):
    (server,) = await program.measure(job)
    assert server.target.model == "scripted"
    assert tuple(result.case for result in server.cases) == CASES
    long_alone, short_beside, decodes, turn, turns = server.cases
    for result in server.cases:
        assert result.errors == []
        assert result.misses == 0
        assert not any(math.isnan(figure) for figure in result.figures.values())
        assert all(ttft > 1 for ttfts in result.ttfts_ms.values() for ttft in ttfts)
    assert len(long_alone.ttfts_ms["long"]) == 2
    assert long_alone.figures["long_prompt_tokens"] == pytest.approx(240, rel=0.15)
    assert {kind: len(ttfts) for kind, ttfts in short_beside.ttfts_ms.items()} == {"short": 6, "long": 2}
    assert short_beside.figures["long_alone_ttft_p50_ms"] == long_alone.figures["long_ttft_p50_ms"]
    assert len(decodes.ttfts_ms["prompt"]) == 4
    assert decodes.figures["prompt_1_ttft_p50_ms"] <= decodes.figures["prompt_last_ttft_p50_ms"]
    assert 1 < decodes.figures["baseline_gap_p50_ms"] <= decodes.figures["baseline_gap_max_ms"] < 1000
    assert decodes.figures["baseline_gaps"] > 2 * 3 * 5
    assert decodes.figures["beside_gaps"] >= 2 * 3
    assert len(turn.ttfts_ms["turn"]) == 2 * 2
    assert turn.figures["turn_prompt_tokens"] == pytest.approx(240 + 80, rel=0.15)
    assert {kind: len(ttfts) for kind, ttfts in turns.ttfts_ms.items()} == {"at_once": 4, "spaced": 4}
    assert turns.figures["spaced_gaps"] > 0


async def test_short_requests_arrive_while_the_long_prompt_is_computed(job, engine):
    engine.delay = 0.1
    await program.measure(replace(job, cases=("short-beside-long",), settings=replace(job.settings, repeat=1)))
    lengths = [request.num_prompt_tokens > 180 for request in engine.requests]
    # Three requests measure token costs. Then: long warm-up, long alone, short warm-up, the long request, three short.
    assert lengths[3:] == [True, True, False, True, False, False, False]


async def test_streams_end_when_the_measurement_ends(job, engine):
    (server,) = await program.measure(replace(job, cases=("decodes-beside-long",)))
    assert server.cases[0].errors == []
    streams = [request for request in engine.requests if request.sampling.max_tokens == 380]
    assert len(streams) == 2 * 3
    async with asyncio.timeout(5):
        while len(engine.aborted) < len(streams):
            await asyncio.sleep(0.01)


async def test_streams_that_end_early_are_errors(job):
    job = with_sizes(job, stream_len=5)
    (server,) = await program.measure(replace(job, cases=("decodes-beside-long",)))
    assert server.cases[0].errors == [ENDED_EARLY] * 6


async def test_turns_that_miss_the_cache_are_counted(job, engine, capsys):
    engine.num_cached_tokens = 8
    (server,) = await program.measure(replace(job, cases=("turn", "turns-beside-decodes")))
    assert [result.misses for result in server.cases] == [4, 8]
    assert [result.figures["turn_cached_tokens"] for result in server.cases] == [8, 8]
    assert "turn: 4 turns missed the prefix cache" in capsys.readouterr().err


async def test_only_a_given_seed_repeats_the_texts(job, url, engine):
    async def prompts(*arguments: str) -> list[list[int]]:
        engine.requests.clear()
        await program.measure(make_job(f"{url}/v1", "--cases=turn", *arguments))
        return [request.prompt_ids.tolist() for request in engine.requests[3:]]

    first, again, new, other = [await prompts(*flags) for flags in (["--seed=7"], ["--seed=7"], [], [])]
    assert first == again
    assert first != new != other != first


async def test_failed_requests_are_counted_and_set_the_exit_status(job, url, service, tmp_path, capsys):
    service.admission.capacity = 2
    file = tmp_path / "figures.json"
    arguments = ["interference", f"{url}/v1", "--cases=decodes-beside-long", f"--json={file}", *SIZES]
    assert await asyncio.to_thread(cli.main, arguments) == 1
    (case,) = json.loads(file.read_bytes())["servers"][0]["cases"]
    assert len(case["errors"]) > 0
    assert all("status 429" in error for error in case["errors"])
    captured = capsys.readouterr()
    assert f"{len(case['errors'])} requests failed: they are in no figure" in captured.err
    assert any(line.split()[1:] == ["failed", str(len(case["errors"]))] for line in captured.out.splitlines())


async def test_case_with_no_answers_has_empty_figures(job, engine):
    job = with_sizes(job, long_len=2000)
    (server,) = await program.measure(replace(job, cases=("long-alone", "short-beside-long")))
    long_alone, short_beside = server.cases
    assert len(long_alone.errors) == 3
    assert len(short_beside.errors) == 2
    assert math.isnan(short_beside.figures["short_ttft_p50_ms"])
    assert ["short-beside-long", "short ttft p50 ms", "-"] in table([server])


async def test_servers_are_columns(job, url):
    job = make_job(f"ours={url}/v1", f"{url}/v1", "--cases=long-alone")
    servers = await program.measure(job)
    header, *rows = table(servers)
    assert header == ["case", "figure", "ours", url.removeprefix("http://")]
    assert {len(row) for row in rows} == {4}
    assert ["long-alone", "failed", "0", "0"] in rows


async def test_server_that_does_not_answer_is_named():
    with pytest.raises(BenchError, match="ours: the server doesn't answer: can't connect"):
        await program.measure(make_job("ours=http://127.0.0.1:1/v1"))


async def test_request_without_an_answer_ends_at_the_time_limit(client, engine):
    engine.delay = 60.0
    client.timeout_s = 0.2
    start = time.perf_counter()
    assert await client.ask(HELLO, 4) is None
    assert time.perf_counter() - start < 5
    assert client.errors == ["no whole answer within 0.2 s: raise --timeout"]


async def test_stream_without_tokens_ends_the_wait_at_the_time_limit(client, engine):
    engine.delay = 60.0
    client.timeout_s = 0.2
    async with decoding(client, [HELLO, HELLO], 50) as streams:
        await streams.wait_until_decoding()
    assert client.errors == ["a decoding stream has no tokens after 0.2 s"]


async def test_stream_whose_request_fails_does_not_block_the_others(client, service):
    service.admission.capacity = 0
    async with decoding(client, [HELLO, HELLO], 50) as streams:
        await streams.wait_until_decoding()
        await streams.wait_for_pieces_after(time.perf_counter())
    assert len(client.errors) == 2


async def test_gap_that_reaches_over_the_window_counts(client):
    streams = DecodeStreams(client, [], 1)
    streams._piece_times = [[1.0, 2.0, 6.0, 7.0], [4.0]]
    assert streams.gaps_touching(3.0, 5.0) == [4.0]
    assert streams.gaps_within(3.0, 5.0) == []
    assert streams.gaps_within(1.0, 6.0) == [1.0, 4.0]


def count_tokens(messages, per_word=2, per_message=5, per_request=3) -> int:
    words = sum(len(message["content"].split()) for message in messages)
    return per_request + per_message * len(messages) + per_word * words


async def test_token_costs_are_those_of_the_server():
    async def ask(messages):
        return count_tokens(messages)

    assert await measure_token_costs(ask) == TokenCosts(per_word=2, per_message=5, per_request=3)


def test_prompts_have_the_length_that_was_asked_for():
    costs = TokenCosts(per_word=2, per_message=5, per_request=3)
    assert count_tokens(single_message(costs, 1008, "seed")) == 1008
    history = conversation(costs, 3000, 100, "seed")
    assert count_tokens(history) == pytest.approx(3000, abs=1)
    assert [message["role"] for message in history] == [*["user", "assistant"] * 15, "user"]
    assert max(count_tokens([message]) for message in history) < 110
    turn = with_next_turn(costs, history, 100, "seed")
    assert turn[: len(history)] == history
    assert [message["role"] for message in turn[len(history) :]] == ["assistant", "user"]
    assert count_tokens(turn) - count_tokens(history) == 100


def test_prompts_are_never_empty():
    costs = TokenCosts(per_word=1, per_message=5, per_request=30)
    for messages in (single_message(costs, 1, ""), conversation(costs, 9, 3, ""), with_next_turn(costs, [], 2, "")):
        assert all(message["content"] for message in messages)
