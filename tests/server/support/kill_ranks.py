"""Kills ranks of servers under load: `python kill_ranks.py [--times N] [--ranks N] [--device D] [-- MODEL FLAG ...]`.

Each time, the program starts a server, opens streams and kills one rank. It checks that every stream and the log have
the error, that `/health` and `/ready` say 503 if they answer, that the server ends with status 1, and that no process,
shared memory or file is left.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

NUM_STREAMS = 8
MAX_ERROR_S = 5.0  # from the kill to the end of the last stream
MAX_END_S = 15.0  # from the end of the last stream to the end of the last process
ENGINE_DIED = "engine died"
RANK_ENDED = "has ended (exit code"
START_TIMEOUT_S = 600.0
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 900, "ignore_eos": True}


def read_processes() -> dict[int, tuple[int, str]]:
    """Returns the parent and the state of each process, by process id."""
    processes = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            processes[int(path.name)] = int(parent), state
    return processes


def find_descendants(pid: int) -> list[int]:
    processes = read_processes()
    found = [pid]
    for ancestor in found:
        found.extend(child for child, (parent, _) in processes.items() if parent == ancestor)
    return found[1:]


def read_memory_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def find_ranks(server_pid: int, num_ranks: int) -> list[int]:
    """Returns the process ids of the ranks. The engine's process is the first."""
    processes = read_processes()
    children = [pid for pid, (parent, _) in processes.items() if parent == server_pid]
    engine = max(children, key=read_memory_pages)
    others = [
        pid
        for pid, (parent, _) in processes.items()
        if parent == engine and "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(others) == num_ranks - 1, f"{len(others)} ranks beside rank 0"
    return [engine, *sorted(others)]


def find_leftovers(directory: str) -> list[str]:
    return [str(path) for path in (*Path(directory).iterdir(), *Path("/dev/shm").glob("nanovllm*"))]


async def read_stream(host: str, port: int, has_begun: asyncio.Event) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    received = bytearray()
    try:
        while data := await reader.read(1 << 16):
            received += data
            if received.count(b"data: ") > 2:
                has_begun.set()
            if b"[DONE]" in received:
                break
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return bytes(received)


def read_status(url: str) -> tuple[int, str] | None:
    """Returns status and body; None if the server does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return None


async def kill_once(command: list[str], rank: int, num_ranks: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        report = await _kill_once(command, rank, num_ranks, directory)
        assert not (files := find_leftovers(directory)), f"left: {files}"
    return report


async def _kill_once(command: list[str], rank: int, num_ranks: int, directory: str) -> str:
    # pytest's process may have set torch's cache directory. The server has to set this directory by itself.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    server = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | {"TMPDIR": directory},
    )
    assert server.stdout is not None
    assert server.stderr is not None
    reading_log = asyncio.create_task(server.stderr.read())
    output = ""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not (urls := re.findall(r"http://([\d.]+):(\d+)", output)):
            line = await server.stdout.readline()
            assert line, f"the server ended at its start:\n{output}"
            output += line.decode()
    host, port = urls[0][0], int(urls[0][1])
    # The streams may end before the kill if it takes long: search for processes first.
    descendants = find_descendants(server.pid)
    victim = find_ranks(server.pid, num_ranks)[rank]
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    streams = [asyncio.create_task(read_stream(host, port, event)) for event in begun]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in begun))
    kill_time_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    answers = await asyncio.gather(*streams)
    error_s = time.monotonic() - kill_time_s
    # The server may end right after its answers, so ask at once.
    routes = [f"http://{host}:{port}{path}" for path in ("/health", "/ready")]
    health_answers = await asyncio.gather(*(asyncio.to_thread(read_status, route) for route in routes))
    async with asyncio.timeout(MAX_END_S):
        exit_status = await server.wait()
        while remaining_pids := [pid for pid in descendants if read_processes().get(pid, (0, "Z"))[1] != "Z"]:
            await asyncio.sleep(0.05)
    end_s = time.monotonic() - kill_time_s
    assert all(b'"error"' in answer for answer in answers), "a stream ended without an error"
    reason = "engine process died" if rank == 0 else f"rank {rank} {RANK_ENDED}"
    assert all(reason.encode() in answer for answer in answers), f"no {reason!r} in an error: {answers[0][-300:]!r}"
    log = (await reading_log).decode()
    assert any(ENGINE_DIED in line and reason in line for line in log.splitlines()), log
    assert error_s <= MAX_ERROR_S, f"the last stream ended after {error_s:.1f} s"
    for found in health_answers:
        assert found is None or (found[0] == 503 and "engine" in found[1]), f"/health and /ready say {health_answers}"
    assert exit_status == 1, f"exit status {exit_status}"
    assert not remaining_pids
    health = "no answer, the server has ended" if health_answers[0] is None else str(health_answers[0][0])
    return f"errors after {error_s:.2f} s, /health {health}, all processes ended after {end_s:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="model and flags of the server")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "nanovllm_server", *arguments.model, "--port", "0", "--device", arguments.device]
    command += ["-tp", str(arguments.ranks)]
    rng = random.Random(0)
    for index in range(arguments.times):
        rank = rng.randrange(arguments.ranks)
        print(f"{index + 1}: rank {rank}: {asyncio.run(kill_once(command, rank, arguments.ranks))}", flush=True)


if __name__ == "__main__":
    main()
