"""`nanovllm-bench serve` over a real socket, and its client with malformed answers."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from nanovllm_server.bench import serve
from nanovllm_server.bench.client import ExchangeError, list_models, parse_base_url, stream_chat
from nanovllm_server.bench.report import BenchError, OutputFiles
from nanovllm_server.bench.serve import ServeOptions, latency_stats
from nanovllm_server.bench.workload import IntegerRange, WorkloadShape

OK_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture
def options(url) -> ServeOptions:
    return ServeOptions(
        endpoint=parse_base_url(f"{url}/v1", None),
        model=None,
        shape=WorkloadShape(6, IntegerRange(3, 5), IntegerRange(8, 8)),
        rates=[None],
        concurrencies=[None],
        temperature=0.0,
        seed=0,
        repeat=1,
        files=OutputFiles(),
    )


@asynccontextmanager
async def serve_answer(answer: bytes):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield parse_base_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", None)


def sse(*chunks: object) -> bytes:
    return b"".join(
        b"data: %b\n\n" % (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) for chunk in chunks
    )


def delta(finish_reason=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


async def test_each_load_gives_one_result(options, engine):
    engine.endless, engine.delay = True, 0.002
    model, results = await serve.measure(replace(options, rates=[None, 200.0], concurrencies=[2, 6]))
    assert model == "scripted"
    assert [(result.rate, result.concurrency) for result in results] == [(None, 2), (None, 6), (200.0, 2), (200.0, 6)]
    for result in results:
        assert result.output_tokens == 48
        assert result.cached_tokens == 6 * 8
        assert (result.accepted_drafts, result.rejected_drafts, result.tokens_per_step) == (0, 0, 1)
        assert result.failed == 0
        assert result.output_tokens_per_second == pytest.approx(48 / result.seconds)
        assert 0 < result.ttft.p50 <= result.ttft.p90 <= result.ttft.p99 <= result.e2e.p99
        assert result.itl.mean > 1
        assert result.tpot.mean == pytest.approx(result.itl.mean)


async def test_requests_have_exact_lengths_and_new_prompts(options, engine):
    engine.endless = True
    await serve.measure(replace(options, repeat=2, temperature=0.25))
    warm_up, *requests = [request.sampling for request in engine.requests]
    assert warm_up.max_tokens == 4
    assert len(requests) == 12
    assert {(sampling.max_tokens, sampling.ignore_eos, sampling.temperature) for sampling in requests} == {
        (8, True, 0.25)
    }
    assert len({tuple(request.prompt_ids) for request in engine.requests[1:]}) == 12


async def test_concurrency_limits_simultaneous_requests(options, engine):
    engine.endless, engine.delay = True, 0.002
    max_active = 0
    submit = engine._submit

    def submit_and_count(key, request):
        nonlocal max_active
        submit(key, request)
        max_active = max(max_active, engine.num_active)

    engine._submit = submit_and_count
    await serve.measure(replace(options, concurrencies=[2]))
    assert max_active == 2


async def test_requests_are_sent_at_the_given_rate(options, engine):
    engine.endless = True
    _, (spread_out,) = await serve.measure(replace(options, rates=[20.0]))
    # The random gaps between requests are the same in every run.
    assert spread_out.seconds > 0.1


async def test_failed_requests_are_in_no_other_figure(options, service, engine, capsys):
    engine.endless, engine.delay = True, 0.005
    service.admission.capacity = 2
    _, (result,) = await serve.measure(options)
    assert result.failed == 4
    assert result.output_tokens == 16
    assert "4 of 6 requests failed (rate inf, concurrency any), the first: status 429" in capsys.readouterr().err


async def test_drafts_are_counted_and_shown(options, engine):
    engine.endless = True
    _, results = await serve.measure(options)
    assert "accepted drafts" not in serve._rate_table(results)[0]
    engine.num_drafts = (6, 4)
    _, (result,) = await serve.measure(replace(options, repeat=2))
    assert (result.accepted_drafts, result.rejected_drafts, result.tokens_per_step) == (36, 24, 4)
    header, row = serve._rate_table([result])
    assert header[-3:] == ["accepted drafts", "rejected", "tokens/step"]
    assert row[-3:] == ["36", "24", "4.00"]


async def test_api_key_is_sent(options, service):
    service.api_keys = ("secret",)
    with pytest.raises(BenchError, match="status 401"):
        await serve.measure(options)
    await serve.measure(replace(options, endpoint=replace(options.endpoint, api_key="secret")))


async def test_unreachable_server_is_an_error(options):
    with pytest.raises(BenchError, match="can't connect to 127.0.0.1:1"):
        await serve.measure(replace(options, endpoint=replace(options.endpoint, port=1)))


async def test_engine_death_in_mid_stream_is_an_error(options, engine):
    engine.endless, engine.delay = True, 0.005
    asyncio.get_running_loop().call_later(0.1, engine.die, "out of memory")
    with pytest.raises(BenchError, match="out of memory"):
        await serve.measure(replace(options, shape=WorkloadShape(3, IntegerRange(3, 3), IntegerRange(400, 400))))


async def test_only_deltas_with_content_are_pieces():
    events = sse(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta("length"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}},
        b"[DONE]",
    )
    async with serve_answer(OK_HEAD + events) as endpoint:
        answer = await stream_chat(endpoint, {})
    assert len(answer.piece_times) == 2
    assert answer.start_time < answer.piece_times[0] <= answer.piece_times[1] <= answer.end_time
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (3, 0, 2)


async def test_answer_without_text_is_measured():
    events = sse(delta("length"), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, b"[DONE]")
    async with serve_answer(OK_HEAD + events) as endpoint:
        answer = await stream_chat(endpoint, {})
    assert answer.piece_times == (answer.end_time,)


@pytest.mark.parametrize("length", [1, 7, 1000])
async def test_events_may_be_split_anywhere(length):
    events = sse(delta(content="a"), delta("stop"), {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}, b"[DONE]")
    parts = [events[start : start + length] for start in range(0, len(events), length)]
    chunks = b"".join(b"%x;ext\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    async with serve_answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) as endpoint:
        assert (await stream_chat(endpoint, {})).output_tokens == 1


@pytest.mark.parametrize(
    ("answer", "expected_error"),
    [
        (b"", "connection broke"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nboom and more", "status 500 Oops: boom$"),
        (OK_HEAD + sse(delta(content="a")), "ended before"),
        (OK_HEAD + sse(delta("stop"), b"[DONE]"), "usage"),
        (OK_HEAD + sse(b"{"), "not JSON"),
        (OK_HEAD + sse({"error": {"message": "no more"}}), "error in the stream: .*no more"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "connection broke"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "connection broke"),
    ],
)
async def test_malformed_answer_is_a_one_line_error(answer, expected_error):
    async with serve_answer(answer) as endpoint:
        with pytest.raises(ExchangeError, match=expected_error) as failure:
            await stream_chat(endpoint, {})
    assert "\n" not in str(failure.value)


async def test_invalid_list_of_models_is_an_error():
    async with serve_answer(OK_HEAD + b"[]") as endpoint:
        with pytest.raises(ExchangeError, match="models"):
            await list_models(endpoint)


def test_base_url_is_split_into_its_parts():
    endpoint = parse_base_url("https://[::1]/some/v1/", "key")
    assert (endpoint.host, endpoint.port, endpoint.uses_tls, endpoint.path_prefix) == ("::1", 443, True, "/some/v1")


def test_latency_stats_are_mean_and_interpolated_percentiles():
    stats = latency_stats(value / 1000 for value in range(101))
    assert (stats.mean, stats.p50, stats.p90, stats.p99) == pytest.approx((50, 50, 90, 99))
    assert latency_stats([0.001, 0.002]).p50 == pytest.approx(1.5)
    assert math.isnan(latency_stats([]).mean)
