"""Clients disconnect, ask for several choices, or send enormous prompts. Also tests logs of requests."""

import asyncio
import itertools
import json
import random
import time
import urllib.request
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.slow

NUM_CLIENTS = 150
NUM_VANISHING = 50
NUM_VANISHING_TOKENS = 400
MAX_ATTEMPTS = 4
MAX_CONCURRENT = 24
PLACE = {"type": "object", "properties": {"place": {"type": "string", "minLength": 20}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PLACE}}


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


def read_metrics(server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.partition("{")[0].removeprefix("nanovllm:"): float(value) for name, _, value in samples}


async def wait_until_idle(server) -> dict[str, float]:
    async with asyncio.timeout(60):
        while True:
            found = await asyncio.to_thread(read_metrics, server)
            if not (found["num_requests_running"] or found["num_requests_waiting"] or found["kv_cache_usage_perc"]):
                return found
            await asyncio.sleep(0.1)


def request_bytes(**fields) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
    data = json.dumps(body | fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(server):
    parts = urlsplit(server.url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def send_request(server, **fields) -> tuple[int, dict]:
    reader, writer = await connect(server)
    writer.write(request_bytes(**fields))
    data = await reader.read()
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def draw_constraint(rng: random.Random) -> dict:
    match rng.choice(["free", "free", "a call", "known", "new"]):
        case "a call":
            return {"tools": [TOOL], "tool_choice": "required"}
        case "known":
            return {"structured_outputs": {"regex": "[a-z ]+"}}
        case "new":
            return {"structured_outputs": {"regex": f"{rng.randrange(1 << 40)}[a-z ]+"}}
    return {}


async def disconnect(server, rng: random.Random) -> None:
    fields = {
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 3]),
        "max_tokens": rng.choice([1, 5, 200]),
        "messages": [{"role": "user", "content": "word " * rng.choice([1, 20, 700])}],
        "stop": rng.choice([None, "zzz"]),
        "logprobs": rng.random() < 0.2,
    }
    if rng.random() < 0.5:
        # Continuing this message makes the model reason.
        fields["messages"].append({"role": "assistant", "content": "<think>"})
        fields["continue_final_message"] = True
    fields |= draw_constraint(rng)
    data = request_bytes(**fields)
    reader, writer = await connect(server)
    try:
        if rng.random() < 0.1:
            writer.write(data[: rng.randrange(len(data))])
        else:
            writer.write(data)
            match rng.choice(["at once", "soon", "later", "at the answer", "in the middle", "at the end"]):
                case "at once":
                    await writer.drain()
                case "soon":
                    await asyncio.sleep(rng.random() * 0.01)
                case "later":
                    await asyncio.sleep(rng.random() * 0.3)
                case "at the answer":
                    await reader.read(1)
                case "in the middle":
                    for _ in range(rng.randrange(1, 20)):
                        await reader.read(300)
                case "at the end":
                    await reader.read()
    finally:
        if rng.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()


async def disconnect_often(server, count: int, seed: int) -> None:
    rng, slots = random.Random(seed), asyncio.Semaphore(MAX_CONCURRENT)

    async def disconnect_in_turn(number: int) -> None:
        async with slots:
            await disconnect(server, random.Random(rng.random() + number))

    await asyncio.gather(*map(disconnect_in_turn, range(count)))


async def test_disconnecting_at_any_moment_frees_everything(server):
    before = await wait_until_idle(server)
    await disconnect_often(server, NUM_CLIENTS, seed=0)
    after = await wait_until_idle(server)
    assert after["generation_tokens_total"] > before["generation_tokens_total"]
    assert not any('"level":"error"' in line or "Traceback" in line for line in server.errors)
    # If the server still counted the disconnected clients, the queue would be full.
    answers = await asyncio.gather(*(send_request(server) for _ in range(MAX_CONCURRENT)))
    assert [status for status, _ in answers] == [200] * MAX_CONCURRENT


async def test_answers_of_fifty_vanished_clients_are_not_generated(shallow_server):
    clients = [await connect(shallow_server) for _ in range(NUM_VANISHING)]
    for number, (_, writer) in enumerate(clients):
        messages = [{"role": "user", "content": f"{number} some word " * 60}]
        writer.write(request_bytes(model="shallow", stream=True, max_tokens=NUM_VANISHING_TOKENS, messages=messages))
    async with asyncio.timeout(60):
        while True:
            found = await asyncio.to_thread(read_metrics, shallow_server)
            if found["num_requests_running"] and found["num_requests_waiting"]:
                break
    await asyncio.sleep(0.5)
    before = await asyncio.to_thread(read_metrics, shallow_server)
    for _, writer in clients:
        writer.transport.abort()
    after = await wait_until_idle(shallow_server)
    num_generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert num_generated < NUM_VANISHING * NUM_VANISHING_TOKENS / 2


async def test_choices_share_one_computed_prompt(server):
    for n, words in ((8, 300), (3, 200)):
        before = await wait_until_idle(server)
        fields = {"n": n, "max_tokens": 4, "cache_salt": f"{n} choices"}
        status, body = await send_request(
            server, messages=[{"role": "user", "content": f"{n} word " * words}], **fields
        )
        after = await wait_until_idle(server)
        assert status == 200
        prompt = body["usage"]["prompt_tokens"]
        assert prompt > words
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert body["usage"]["completion_tokens"] == 4 * n
        computed = after["iteration_tokens_total_sum"] - before["iteration_tokens_total_sum"]
        assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == prompt
        assert prompt < computed <= prompt + (n - 1) * 16 + 4 * n
        assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] >= (n - 1) * (prompt - 16)


async def measure_gap_beside_enormous_prompts(server, number: int) -> tuple[float, list[float]]:
    """Returns the longest gap between two parts of a stream in seconds, and the seconds to answer each prompt.

    number: begins the prompts. The server encodes prompts with a new number without its cache of encodings.
    """
    reader, writer = await connect(server)
    writer.write(request_bytes(stream=True, max_tokens=900))
    await reader.readuntil(b"data: ")
    arrivals = [time.monotonic()]

    async def read() -> None:
        while await reader.read(1 << 16):
            arrivals.append(time.monotonic())

    reading = asyncio.create_task(read())
    durations_s = []
    for size in (100_000, 1_000_000):
        begin = time.monotonic()
        status, body = await send_request(
            server,
            messages=[{"role": "user", "content": f"{number:04} word " * (size // 10)}],
            truncate_prompt_tokens=500,
        )
        durations_s.append(time.monotonic() - begin)
        assert (status, body["usage"]["prompt_tokens"]) == (200, 500)
    end = time.monotonic()
    reading.cancel()
    writer.close()
    arrivals_meanwhile = [arrivals[0], *(arrival for arrival in arrivals if arrival < end), end]
    return max(after - before for before, after in itertools.pairwise(arrivals_meanwhile)), durations_s


async def test_an_enormous_prompt_stalls_no_stream(server):
    attempts = []
    for number in range(MAX_ATTEMPTS):
        longest_gap_s, durations_s = await measure_gap_beside_enormous_prompts(server, number)
        await wait_until_idle(server)
        if longest_gap_s < max(durations_s) / 2:
            return
        # Other programs may have delayed the stream.
        attempts.append((longest_gap_s, durations_s))
    pytest.fail(f"gaps and durations in seconds: {attempts}")


async def test_with_log_prompts_a_request_and_its_prompt_have_a_log_line_each(server):
    await wait_until_idle(server)
    num_old_lines = len(server.errors)
    status, _ = await send_request(
        server, request_id="the-one", messages=[{"role": "user", "content": "a secret"}], n=2
    )
    assert status == 200
    async with asyncio.timeout(60):
        while not any('"event":"request"' in line and "the-one" in line for line in server.errors[num_old_lines:]):
            await asyncio.sleep(0.02)
    lines = [json.loads(line) for line in server.errors[num_old_lines:] if "the-one" in line]
    prompt, line = lines
    assert (prompt["event"], line["event"]) == ("prompt", "request")
    assert "a secret" in prompt["text"]
    assert "a secret" not in json.dumps(line)
    assert (line["status"], line["completion_tokens"], line["finish_reason"]) == (200, 4, "length,length")
    assert 0 < line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"]


async def test_prompts_are_not_logged_by_default_and_a_drain_timeout_ends_streams_with_an_error(run_server, tiny_model):
    with run_server(tiny_model, "--max-model-len", "256", "--cpu-cache-gib", "0.02", "--served-model-name", "tiny",
                    "--log-level", "debug", "--drain-timeout", "1") as server:  # fmt: skip
        assert (await send_request(server, messages=[{"role": "user", "content": "a secret"}]))[0] == 200
        assert (await send_request(server, messages=[{"role": "user", "content": "a secret"}], temperature=9))[0] == 400
        reader, writer = await connect(server)
        writer.write(request_bytes(stream=True, max_tokens=200, n=100, logprobs=True))
        await reader.readuntil(b"data: ")
        reading = asyncio.create_task(reader.read())
        assert await asyncio.to_thread(server.stop) == 0
        data = await reading
        writer.close()
        assert b"event: error\ndata: " in data
        assert b"shutting down" in data
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not any("secret" in line or "Traceback" in line for line in server.errors)
