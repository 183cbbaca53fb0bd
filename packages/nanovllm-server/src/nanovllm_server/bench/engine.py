"""Runs requests on our engine in this process, and measures their times."""

import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tqdm import tqdm

from nanovllm_core import AsyncEngine, EngineConfig, ModelSpec, Request, SamplingParams
from nanovllm_server.bench.workload import Work

# Enough tokens to compile every kernel for prefill and decode.
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one run, in seconds since the requests were submitted.

    num_tokens: output tokens of all requests.
    last: time of the last token.
    first: time at which every request had its first token; None if not measured.
    """

    num_tokens: int
    last: float
    first: float | None


async def measure(
    spec: ModelSpec,
    config: EngineConfig,
    cases: Sequence[Sequence[Work]],
    temperature: float,
    repeat: int,
    *,
    needs_first: bool,
) -> list[list[Timing]]:
    """Starts an engine and runs each case `repeat` times after a warm-up. Returns the timings by case.

    needs_first: measure the time of first tokens with an extra run for one token per request. Our engine could
    measure it directly, but peers that return only complete answers can't.

    Raises ConfigError, ModelError, RequestError (a request does not fit) and EngineDeadError.
    """
    engine = await AsyncEngine.start(spec, config)
    # Like the server: a garbage collection over all objects of torch and the model stops every request for 0.2 s.
    gc.collect()
    gc.freeze()
    try:
        timings: list[list[Timing]] = []
        for case, works in enumerate(cases):
            name = f"nanovllm, case {case + 1}/{len(cases)}"
            await _run(engine, _cut(works, WARM_UP_TOKENS), temperature, f"{name}, warm-up")
            timings.append([])
            for repetition in range(repeat):
                label = f"{name}, run {repetition + 1}/{repeat}"
                first = None
                if needs_first:
                    _, first = await _run(engine, _cut(works, 1), temperature, f"{label}, first tokens")
                timings[-1].append(Timing(*await _run(engine, works, temperature, label), first))
        return timings
    finally:
        await engine.stop()


def _cut(works: Sequence[Work], at_most: int) -> list[Work]:
    return [Work(work.prompt, min(work.max_tokens, at_most)) for work in works]


async def _run(engine: AsyncEngine, works: Sequence[Work], temperature: float, label: str) -> tuple[int, float]:
    """Submits all requests at once and waits for the last token. Returns the number of tokens and the seconds."""
    requests = [
        Request(
            id=str(index),
            token_ids=work.prompt,
            sampling=SamplingParams(max_tokens=work.max_tokens, temperature=temperature, ignore_eos=True),
            # A run can find its own shared prefix in the prefix cache, but nothing of earlier runs.
            cache_salt=label,
        )
        for index, work in enumerate(works)
    ]
    for request in requests:
        engine.check(request)
    total = sum(work.max_tokens for work in works)
    with tqdm(total=total, desc=label, unit="tok", disable=not sys.stderr.isatty()) as bar:
        start = time.perf_counter()

        async def one(request: Request) -> int:
            num_tokens = 0
            async with aclosing(engine.generate(request)) as outputs:
                async for output in outputs:
                    num_tokens += len(output.new_token_ids)
                    bar.update(len(output.new_token_ids))
            return num_tokens

        counts = await asyncio.gather(*(one(request) for request in requests))
        return sum(counts), time.perf_counter() - start
