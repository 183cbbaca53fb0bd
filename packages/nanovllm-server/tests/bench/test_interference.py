import asyncio
import json
import math
import time
from dataclasses import replace

import pytest

from nanovllm_server.bench import bench_cli
from nanovllm_server.bench.client import parse_base_url
from nanovllm_server.bench.flags import DEFAULT_URL, build_parser
from nanovllm_server.bench.interference.decode_streams import STREAM_ENDED_EARLY, DecodeStreams
from nanovllm_server.bench.interference.interference_flags import make_options
from nanovllm_server.bench.interference.interference_sizes import CASE_NAMES, InterferenceSizes
from nanovllm_server.bench.report import BenchError, InvalidSettingsError
from nanovllm_server.bench.server_cases import case_client
from nanovllm_server.bench.server_cases.case_client import CaseClient
from nanovllm_server.bench.server_cases.case_command import CaseOptions, measure
from nanovllm_server.bench.server_cases.case_results import make_table

SIZE_FLAGS = [
    "--long-len=240",
    "--num-short=3",
    "--short-len=80",
    "--output-len=3",
    "--streams=3",
    "--stream-len=380",
    "--baseline-s=0.05",
    "--num-prompts=2",
    "--arrival-rates=0,60",
    "--arrival-period-s=0.2",
    "--prompt-len=200",
    "--turn-conversations=2",
    "--conversations=2",
    "--conversation-len=240",
    "--message-len=60",
    "--turn-len=80",
    "--turn-streams=2",
    "--turn-interval-ms=10",
    "--repeat=2",
]
HELLO_MESSAGES = [{"role": "user", "content": "Hello"}]


def parse_options(*arguments: str) -> CaseOptions[InterferenceSizes]:
    return make_options(build_parser().parse_args(["interference", *arguments, *SIZE_FLAGS]), DEFAULT_URL, None)


def with_sizes(options: CaseOptions[InterferenceSizes], **sizes) -> CaseOptions[InterferenceSizes]:
    return replace(options, settings=replace(options.settings, sizes=replace(options.settings.sizes, **sizes)))


@pytest.fixture
def options(url, engine, service) -> CaseOptions[InterferenceSizes]:
    # On a busy machine, more requests are open at the same time.
    service.admission.capacity = 100
    engine.endless, engine.delay, engine.num_cached_tokens = True, 0.002, 230
    return parse_options(f"{url}/v1", "--seed=1")


@pytest.fixture
def client(url) -> CaseClient:
    return CaseClient([parse_base_url(f"{url}/v1", None)], "scripted", temperature=0.0, timeout_s=5.0)


async def test_each_case_reports_its_figures(options):
    (result,) = await measure(options)
    assert result.server.model == "scripted"
    assert tuple(case.case for case in result.case_results) == CASE_NAMES
    long_alone, short_beside, decodes, arrivals, turn, turns = result.case_results
    for case in result.case_results:
        assert case.errors == []
        assert case.warnings == []
        assert not any(math.isnan(figure) for figure in case.figures.values())
        assert all(ttft > 1 for ttfts in case.ttfts_ms.values() for ttft in ttfts)
    assert len(long_alone.ttfts_ms["long"]) == 2
    assert long_alone.figures["long_prompt_tokens"] == pytest.approx(240, rel=0.15)
    assert {kind: len(ttfts) for kind, ttfts in short_beside.ttfts_ms.items()} == {"short": 6, "long": 2}
    assert short_beside.figures["long_alone_ttft_p50_ms"] == long_alone.figures["long_ttft_p50_ms"]
    assert len(decodes.ttfts_ms["prompt"]) == 4
    assert decodes.figures["prompt_1_ttft_p50_ms"] <= decodes.figures["prompt_last_ttft_p50_ms"]
    assert 1 < decodes.figures["baseline_gap_p50_ms"] <= decodes.figures["baseline_gap_max_ms"]
    assert decodes.figures["baseline_gaps"] >= 2 * 3
    assert decodes.figures["beside_gaps"] >= 2 * 3
    assert {kind: len(ttfts) > 1 for kind, ttfts in arrivals.ttfts_ms.items()} == {"rate_0": False, "rate_60": True}
    assert "rate_0_ttft_p50_ms" not in arrivals.figures
    assert arrivals.figures["rate_60_ttft_p50_ms"] > 1
    assert min(arrivals.figures[f"rate_{rate}_gaps"] for rate in (0, 60)) > 0
    assert len(turn.ttfts_ms["turn"]) == 2 * 2
    assert turn.figures["turn_prompt_tokens"] == pytest.approx(240 + 80, rel=0.15)
    assert {kind: len(ttfts) for kind, ttfts in turns.ttfts_ms.items()} == {"at_once": 4, "spaced": 4}
    assert turns.figures["spaced_gaps"] > 0


async def test_short_requests_arrive_while_the_long_prompt_is_computed(options, engine):
    engine.delay = 0.1
    await measure(replace(options, cases=("short-beside-long",), settings=replace(options.settings, repeat=1)))
    is_long = [request.num_prompt_tokens > 180 for request in engine.requests]
    # Three requests measure token costs. The last four are the long request and the short requests beside it.
    assert is_long[3:] == [True, True, False, True, False, False, False]


async def test_replicas_of_a_server_get_requests_in_turn(url, monkeypatch):
    ((label, endpoints),) = parse_options(f"pair={url}/v1,http://127.0.0.1:1/v1").endpoints
    assert label == "pair"
    used_ports: list[int] = []

    async def record_port(endpoint, body, on_piece):
        used_ports.append(endpoint.port)

    monkeypatch.setattr(case_client, "stream_chat", record_port)
    client = CaseClient(endpoints, "scripted", temperature=0.0, timeout_s=5.0)
    for _ in range(4):
        await client.send(HELLO_MESSAGES, 1)
    assert used_ports == [endpoints[0].port, 1] * 2


async def test_cases_with_conversations_refuse_replicas(url):
    options = parse_options(f"pair={url}/v1,{url}/v1", "--cases=turn")
    with pytest.raises(InvalidSettingsError, match="turn: a conversation's turns would go to different replicas"):
        await measure(options)


def test_the_label_of_replicas_has_their_addresses():
    assert [label for label, _ in parse_options("http://a:1/v1,http://b:2/v1").endpoints] == ["a:1,b:2"]


async def test_streams_end_when_the_measurement_ends(options, engine):
    (result,) = await measure(replace(options, cases=("decodes-beside-long",)))
    assert result.case_results[0].errors == []
    streams = [request for request in engine.requests if request.sampling.max_tokens == 380]
    assert len(streams) == 2 * 3
    async with asyncio.timeout(30):
        while len(engine.aborted) < len(streams):
            await asyncio.sleep(0.01)


async def test_streams_that_end_early_are_errors(options):
    options = with_sizes(options, stream_len=5)
    (result,) = await measure(replace(options, cases=("decodes-beside-long",)))
    assert result.case_results[0].errors == [STREAM_ENDED_EARLY] * 6


async def test_turns_that_miss_the_cache_are_counted(options, engine, capsys):
    engine.num_cached_tokens = 8
    (result,) = await measure(replace(options, cases=("turn", "turns-beside-decodes")))
    assert [case.figures["turn_cache_misses"] for case in result.case_results] == [4, 8]
    assert [case.figures["turn_cached_tokens"] for case in result.case_results] == [8, 8]
    assert "turn: 4 turns missed the prefix cache" in capsys.readouterr().err


async def test_only_a_given_seed_repeats_the_texts(options, url, engine):
    async def send_prompts(*arguments: str) -> list[list[int]]:
        engine.requests.clear()
        await measure(parse_options(f"{url}/v1", "--cases=turn", *arguments))
        return [request.prompt_ids.tolist() for request in engine.requests[3:]]

    assert await send_prompts("--seed=7") == await send_prompts("--seed=7")
    assert await send_prompts() != await send_prompts()


async def test_failed_requests_are_counted_and_set_the_exit_status(options, url, service, tmp_path, capsys):
    service.admission.capacity = 2
    file = tmp_path / "figures.json"
    arguments = ["interference", f"{url}/v1", "--cases=decodes-beside-long", f"--json={file}", *SIZE_FLAGS]
    assert await asyncio.to_thread(bench_cli.main, arguments) == 1
    (case,) = json.loads(file.read_bytes())["servers"][0]["cases"]
    assert len(case["errors"]) > 0
    assert all("status 429" in error for error in case["errors"])
    captured = capsys.readouterr()
    assert f"{len(case['errors'])} requests failed: the results leave these requests out" in captured.err
    assert any(line.split()[1:] == ["failed", str(len(case["errors"]))] for line in captured.out.splitlines())


async def test_case_with_no_answers_has_empty_figures(options, engine):
    options = with_sizes(options, long_len=2000)
    (result,) = await measure(replace(options, cases=("long-alone", "short-beside-long")))
    long_alone, short_beside = result.case_results
    assert len(long_alone.errors) == 3
    assert len(short_beside.errors) == 2
    assert math.isnan(short_beside.figures["short_ttft_p50_ms"])
    assert ["short-beside-long", "short ttft p50 ms", "-"] in make_table([result])


async def test_servers_are_columns(options, url):
    options = parse_options(f"ours={url}/v1", f"{url}/v1", "--cases=long-alone")
    header, *rows = make_table(await measure(options))
    assert header == ["case", "figure", "ours", url.removeprefix("http://")]
    assert {len(row) for row in rows} == {4}
    assert ["long-alone", "failed", "0", "0"] in rows


async def test_server_that_does_not_answer_is_named():
    with pytest.raises(BenchError, match="ours: the server doesn't answer: can't connect"):
        await measure(parse_options("ours=http://127.0.0.1:1/v1"))


async def test_stream_without_tokens_ends_the_wait_at_the_time_limit(client, engine):
    engine.delay = 60.0
    client.timeout_s = 0.2
    async with DecodeStreams(client, [HELLO_MESSAGES, HELLO_MESSAGES], 50) as streams:
        await streams.wait_until_decoding()
    assert client.errors == ["a decoding stream has no tokens after 0.2 s"]


async def test_stream_whose_request_fails_does_not_block_the_others(client, service):
    service.admission.capacity = 0
    async with DecodeStreams(client, [HELLO_MESSAGES, HELLO_MESSAGES], 50) as streams:
        await streams.wait_until_decoding()
        await streams.wait_for_pieces_after(time.perf_counter())
    assert len(client.errors) == 2


async def test_gap_that_spans_the_interval_counts_as_overlapping(client):
    streams = DecodeStreams(client, [], 1)
    streams._piece_times_by_stream = [[1.0, 2.0, 6.0, 7.0], [4.0]]
    assert streams.list_gaps_overlapping(3.0, 5.0) == [4.0]
    assert streams.list_gaps_within(3.0, 5.0) == []
    assert streams.list_gaps_within(1.0, 6.0) == [1.0, 4.0]
