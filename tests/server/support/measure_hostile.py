"""Measures each hostile input on a running server: seconds to the answer, and the gap that it adds to a stream.

On an idle machine, start `nanovllm-server --served-model-name tiny --max-model-len 512 --cpu-cache-gib 0.02`, and then
run `python tests/server/support/measure_hostile.py http://127.0.0.1:8000`. The limit on gaps applies only to refused
inputs: an accepted prompt delays streams like any prompt.
"""

import argparse
import asyncio
import random
import sys

from hostile_cases import (
    ADDED_GAP_LIMIT_S,
    ANSWER_LIMIT_S,
    WARM_UP,
    make_body_cases,
    make_field_cases,
    make_wire_cases,
)
from hostile_exchange import measure_answer, run_streams, send_case
from hostile_requests import make_request_cases
from hostile_schemas import make_cost_cases

# Only first attempts count. Later attempts show whether another program slowed a first attempt.
NUM_ATTEMPTS = 3
ALONE_MEASUREMENT_S = 5.0
NUM_SHOWN = 12


async def measure(url: str) -> int:
    cases = [*make_wire_cases(), *make_body_cases(), *make_field_cases(), *make_request_cases(), *make_cost_cases()]
    random.Random(0).shuffle(cases)
    assert await send_case(url, WARM_UP) is None
    answers_s = {case.name: [await measure_answer(url, case) for _ in range(NUM_ATTEMPTS)] for case in cases}
    async with run_streams(url) as streams:
        alone_s = await streams.measure_gap_alone(ALONE_MEASUREMENT_S)
        gaps_s = {case.name: [await streams.measure_gap(case) for _ in range(NUM_ATTEMPTS)] for case in cases}
    print(f"{len(cases)} cases; longest gap within a stream alone: {1000 * alone_s:.0f} ms")
    num_over = show("seconds to the answer", answers_s, ANSWER_LIMIT_S)
    refused_gaps_s, accepted_gaps_s = (
        {case.name: gaps_s[case.name] for case in cases if case.is_refused == is_refused}
        for is_refused in (True, False)
    )
    gap_limit_s = alone_s + ADDED_GAP_LIMIT_S
    num_over += show("seconds of the longest gap beside a refused input", refused_gaps_s, gap_limit_s)
    show("seconds of the longest gap beside an input that may be accepted", accepted_gaps_s, gap_limit_s)
    return num_over


def show(title: str, seconds_by_case: dict[str, list[float]], limit_s: float) -> int:
    num_over = sum(first_s > limit_s for first_s, *_ in seconds_by_case.values())
    print(f"{title}: {num_over} of {len(seconds_by_case)} first attempts over {limit_s:.3f} s\n  first  best")
    for name, attempts_s in sorted(seconds_by_case.items(), key=lambda item: -item[1][0])[:NUM_SHOWN]:
        print(f"  {attempts_s[0]:.3f}  {min(attempts_s):.3f}  {name}")
    return num_over


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server's address, such as http://127.0.0.1:8000")
    sys.exit(asyncio.run(measure(parser.parse_args().url)) > 0)
