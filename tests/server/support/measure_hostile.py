"""Measures each hostile input on a running server: seconds to the answer, and the gap that it adds to a stream.

On an idle machine, start `nanovllm-server --served-model-name tiny --max-model-len 512 --cpu-cache-gib 0.02`, and then
run `python tests/server/support/measure_hostile.py http://127.0.0.1:8000`. Exits with 1 if a case is over a limit.
"""

import asyncio
import random
import sys
import time

from hostile_cases import Case, chat_request, make_body_cases, make_field_cases, make_wire_cases
from hostile_exchange import longest_gap, measure_gap, send_case, stream_until
from hostile_requests import make_cost_cases, make_request_cases

MAX_ANSWER_S = 1.0
MAX_ADDED_GAP_S = 0.1
# Other programs also cause gaps, so a case counts with the smallest figures of this number of attempts.
NUM_ATTEMPTS = 3
IDLE_S = 5.0
NUM_SHOWN = 8


async def measure(url: str) -> int:
    """Print the slowest answers and the longest gaps. Returns the number of cases that exceed a limit."""
    cases = [*make_wire_cases(), *make_body_cases(), *make_field_cases(), *make_request_cases(), *make_cost_cases()]
    random.Random(0).shuffle(cases)
    warm_up = chat_request(structured_outputs={"regex": "a"})
    assert await send_case(url, Case("first grammar", warm_up, frozenset({200}))) is None
    answer_s = {case.name: await measure_answer(url, case) for case in cases}
    stop, arrivals = asyncio.Event(), list[float]()
    stream = asyncio.create_task(stream_until(url, stop, arrivals))
    try:
        begin = time.monotonic()
        await asyncio.sleep(IDLE_S)
        idle_gap_s = longest_gap(arrivals, begin)
        gap_s = {
            case.name: min([await measure_gap(url, case, arrivals, stream) for _ in range(NUM_ATTEMPTS)])
            for case in cases
        }
    finally:
        stop.set()
        await stream
    print(f"{len(cases)} cases; longest gap of a stream alone: {1000 * idle_gap_s:.0f} ms")
    for title, seconds in (("seconds to the answer", answer_s), ("longest gap beside the case", gap_s)):
        print(title)
        for name in sorted(seconds, key=lambda name: -seconds[name])[:NUM_SHOWN]:
            print(f"  {seconds[name]:.3f} s  {name}")
    late = [name for name, seconds in answer_s.items() if seconds > MAX_ANSWER_S]
    delaying = [name for name, seconds in gap_s.items() if seconds > idle_gap_s + MAX_ADDED_GAP_S]
    print(f"answers over {MAX_ANSWER_S:g} s: {late}; gaps over {MAX_ADDED_GAP_S:g} s more: {delaying}")
    return len(late) + len(delaying)


async def measure_answer(url: str, case: Case) -> float:
    """Return the shortest time to a right answer, in seconds."""
    durations_s: list[float] = []
    for _ in range(NUM_ATTEMPTS):
        begin = time.monotonic()
        assert (problem := await send_case(url, case)) is None, f"{case.name}: {problem}"
        durations_s.append(time.monotonic() - begin)
    return min(durations_s)


if __name__ == "__main__":
    sys.exit(asyncio.run(measure(sys.argv[1])) > 0)
