"""A table of hostile inputs: the server refuses each one or closes its connection, delays no stream, leaks nothing."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from hostile_cases import Case, chat_request, make_body_cases, make_field_cases, make_wire_cases
from hostile_exchange import measure_gap, send_case, stream_until
from hostile_requests import make_cost_cases, make_request_cases

pytestmark = pytest.mark.slow

MOST_TIMES = 7
AT_ONCE = 8
CASES = [*make_wire_cases(), *make_body_cases(), *make_field_cases(), *make_request_cases()]
COST_CASES = make_cost_cases()
# Most seconds between two chunks of a stream beside a case. On an idle machine the time is below 100 ms.
MAX_GAP_S = 0.5
MOST_ATTEMPTS = 3
# A stream runs beside a sample of the cases, because a stream beside every case would take half a minute.
NUM_STREAMED_CASES = 60


@pytest.fixture(scope="module")
def target(run_server, tiny_model):
    flags = ("--max-model-len", "512", "--cpu-cache-gib", "0.02", "--served-model-name", "tiny", "--log-format", "json")
    with run_server(tiny_model, *flags) as server:
        yield server


async def run_all(url: str) -> dict[str, str]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def run_in_turn(case: Case) -> tuple[str, str | None]:
        async with slots:
            return case.name, await send_case(url, case)

    return {name: wrong for name, wrong in await asyncio.gather(*map(run_in_turn, CASES)) if wrong is not None}


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_the_table_has_many_cases_with_unique_names():
    assert len({case.name for case in [*CASES, *COST_CASES]}) == len([*CASES, *COST_CASES]) > 300


async def test_each_hostile_input_is_refused_without_a_leak(target):
    assert await run_all(target.url) == {}
    pids = [*target.worker_pids(), target.engine_pid()]
    # The heap reaches its largest size after a few rounds. With a leak it would grow in every round.
    sizes = [[resident_bytes(pid) for pid in pids]]
    while len(sizes) < 2 or any(after - before > 16 << 20 for before, after in zip(sizes[-2], sizes[-1], strict=True)):
        assert len(sizes) < MOST_TIMES, sizes
        assert await run_all(target.url) == {}
        assert [*target.worker_pids(), target.engine_pid()] == pids
        sizes.append([resident_bytes(pid) for pid in pids])
    assert await send_case(target.url, Case("good", chat_request(), frozenset({200}))) is None
    lines = [json.loads(line) for line in target.errors]
    assert {line["level"] for line in lines} <= {"info", "warning"}, [
        line for line in lines if line["level"] == "error"
    ]


async def test_hostile_inputs_delay_no_stream(target):
    """Checks the smallest of several attempts' longest gaps: a busy machine delays one attempt, a stall delays all."""
    warm_up = chat_request(structured_outputs={"regex": "a"})
    assert await send_case(target.url, Case("first grammar", warm_up, frozenset({200}))) is None
    stop, arrivals, delayed = asyncio.Event(), list[float](), dict[str, float]()
    stream = asyncio.create_task(stream_until(target.url, stop, arrivals))
    try:
        for case in [*random.Random(0).sample(CASES, NUM_STREAMED_CASES), *COST_CASES]:
            gaps: list[float] = []
            while len(gaps) < MOST_ATTEMPTS and min(gaps, default=MAX_GAP_S) >= MAX_GAP_S:
                gaps.append(await measure_gap(target.url, case, arrivals, stream))
            if min(gaps) >= MAX_GAP_S:
                delayed[case.name] = min(gaps)
    finally:
        stop.set()
        await stream
    assert delayed == {}
