"""`nanovllm-bench serve` over a real socket, and its client with malformed answers."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from nanovllm_server.bench import serve
from nanovllm_server.bench.client import ExchangeError, list_models, parse_base_url, stream_chat
from nanovllm_server.bench.report import BenchError, Results
from nanovllm_server.bench.serve import ServeJob, spread
from nanovllm_server.bench.workload import Lengths, WorkloadShape

OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture
def job(url) -> ServeJob:
    return ServeJob(
        endpoint=parse_base_url(f"{url}/v1", None),
        model=None,
        shape=WorkloadShape(6, Lengths(3, 5), Lengths(8, 8)),
        rates=[None],
        concurrencies=[None],
        temperature=0.0,
        seed=0,
        repeat=1,
        results=Results(None, None),
    )


@asynccontextmanager
async def answering(answer: bytes):
    """A server that says only this, and the endpoint it is at."""

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


async def test_each_load_gives_one_point(job, engine):
    engine.endless, engine.delay = True, 0.002
    model, points = await serve.measure(replace(job, rates=[None, 200.0], concurrencies=[2, 6]))
    assert model == "scripted"
    assert [(point.rate, point.concurrency) for point in points] == [(None, 2), (None, 6), (200.0, 2), (200.0, 6)]
    for point in points:
        assert point.output_tokens == 48
        assert point.cached_tokens == 6 * 8
        assert point.failed == 0
        assert point.output_tokens_per_second == pytest.approx(48 / point.seconds)
        assert 0 < point.ttft.p50 <= point.ttft.p90 <= point.ttft.p99 <= point.e2e.p99
        assert 1 < point.itl.mean < 100
        assert point.tpot.mean == pytest.approx(point.itl.mean)


async def test_requests_have_exact_lengths_and_new_prompts(job, engine):
    engine.endless = True
    await serve.measure(replace(job, repeat=2, temperature=0.25))
    warm_up, *requests = [request.sampling for request in engine.requests]
    assert warm_up.max_tokens == 4
    assert len(requests) == 12
    assert {(one.max_tokens, one.ignore_eos, one.temperature) for one in requests} == {(8, True, 0.25)}
    # A repetition has prompts that the server hasn't seen.
    assert len({tuple(request.prompt_ids) for request in engine.requests[1:]}) == 12


async def test_concurrency_is_a_limit(job, engine):
    engine.endless, engine.delay = True, 0.002
    most = 0
    submit = engine._submit

    def count(request):
        nonlocal most
        submit(request)
        most = max(most, engine.num_active)

    engine._submit = count
    await serve.measure(replace(job, concurrencies=[2]))
    assert most == 2


async def test_rate_spreads_the_requests(job, engine):
    engine.endless = True
    _, (at_once, spread_out) = await serve.measure(replace(job, rates=[None, 20.0]))
    # Five gaps of 50 ms on average; the same gaps each time.
    assert spread_out.seconds > 0.1
    assert spread_out.seconds > 2 * at_once.seconds


async def test_failures_are_counted_and_left_out(job, service, engine, capsys):
    engine.endless, engine.delay = True, 0.005
    service.admission.capacity = 2
    _, (point,) = await serve.measure(job)
    assert point.failed == 4
    assert point.output_tokens == 16
    assert "4 of 6 requests failed (rate inf, concurrency any), the first: status 429" in capsys.readouterr().err


async def test_a_key_is_sent(job, service):
    service.api_keys = ("secret",)
    with pytest.raises(BenchError, match="status 401"):
        await serve.measure(job)
    await serve.measure(replace(job, endpoint=replace(job.endpoint, key="secret")))


async def test_unreachable_server_is_an_error(job):
    with pytest.raises(BenchError, match="can't connect to 127.0.0.1:1"):
        await serve.measure(replace(job, endpoint=replace(job.endpoint, port=1)))


async def test_engine_death_in_mid_stream_is_an_error(job, engine):
    engine.endless, engine.delay = True, 0.005
    asyncio.get_running_loop().call_later(0.1, engine.die, "out of memory")
    with pytest.raises(BenchError, match="out of memory"):
        await serve.measure(replace(job, shape=WorkloadShape(3, Lengths(3, 3), Lengths(400, 400))))


async def test_only_deltas_with_content_are_pieces():
    events = sse(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta("length"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}},
        b"[DONE]",
    )
    async with answering(OK + events) as endpoint:
        answer = await stream_chat(endpoint, {})
    assert len(answer.pieces) == 2
    assert answer.sent < answer.pieces[0] <= answer.pieces[1] <= answer.ended
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (3, 0, 2)


async def test_answer_without_text_is_measured():
    events = sse(delta("length"), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, b"[DONE]")
    async with answering(OK + events) as endpoint:
        answer = await stream_chat(endpoint, {})
    assert answer.pieces == (answer.ended,)


@pytest.mark.parametrize("length", [1, 7, 1000])
async def test_events_may_come_in_any_pieces(length):
    events = sse(delta(content="a"), delta("stop"), {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}, b"[DONE]")
    parts = [events[start : start + length] for start in range(0, len(events), length)]
    chunks = b"".join(b"%x;ext\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    async with answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) as endpoint:
        assert (await stream_chat(endpoint, {})).output_tokens == 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "connection broke"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nboom and more", "status 500 Oops: boom$"),
        (OK + sse(delta(content="a")), "ended before"),
        (OK + sse(delta("stop"), b"[DONE]"), "usage"),
        (OK + sse(b"{"), "not JSON"),
        (OK + sse({"error": {"message": "no more"}}), "in mid-stream: .*no more"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "connection broke"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "connection broke"),
    ],
)
async def test_malformed_answer_is_a_one_line_error(answer, complaint):
    async with answering(answer) as endpoint:
        with pytest.raises(ExchangeError, match=complaint) as failure:
            await stream_chat(endpoint, {})
    assert "\n" not in str(failure.value)


async def test_invalid_list_of_models_is_an_error():
    async with answering(OK + b"[]") as endpoint:
        with pytest.raises(ExchangeError, match="models"):
            await list_models(endpoint)


def test_base_url_is_split_into_its_parts():
    endpoint = parse_base_url("https://[::1]/some/v1/", "key")
    assert (endpoint.host, endpoint.port, endpoint.tls, endpoint.prefix) == ("::1", 443, True, "/some/v1")


def test_spread_is_mean_and_interpolated_percentiles():
    of = spread(value / 1000 for value in range(101))
    assert (of.mean, of.p50, of.p90, of.p99) == pytest.approx((50, 50, 90, 99))
    assert spread([0.001, 0.002]).p50 == pytest.approx(1.5)
    assert math.isnan(spread([]).mean)
