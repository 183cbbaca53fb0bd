"""Our engine, in this process: work in, times out. This room must not know whom it is compared to."""

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

# Enough to have every kernel compiled, and the shapes of both prefill and decode seen.
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """When tokens came, in seconds since the requests were handed over. `num_tokens` counts all requests' output.

    first: when every request had one; None where that wasn't looked at.
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
    """Start an engine, and run each case `repeat` times after a warm-up; the timings by case.

    needs_first: find out when every request had its first token, by a run for one token each: all that can be asked of
    an engine that gives whole answers alone, and so asked of ours.
    Raises ConfigError, ModelError, RequestError for work that the engine has no room for, and EngineDeadError.
    """
    engine = await AsyncEngine.start(spec, config)
    # As servers do: a collection that walks through all that torch and the model hold stops every request for 0.2 s.
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
    """Hand all requests over at once and wait for the last token, with a progress bar of tokens; how many there were,
    and the seconds it took.
    """
    requests = [
        Request(
            id=str(index),
            token_ids=work.prompt,
            sampling=SamplingParams(max_tokens=work.max_tokens, temperature=temperature, ignore_eos=True),
            # A run finds what its own prompts share in the prefix cache, and nothing of the run before it.
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
            made = 0
            async with aclosing(engine.generate(request)) as outputs:
                async for output in outputs:
                    made += len(output.new_token_ids)
                    bar.update(len(output.new_token_ids))
            return made

        counts = await asyncio.gather(*(one(request) for request in requests))
        return sum(counts), time.perf_counter() - start
