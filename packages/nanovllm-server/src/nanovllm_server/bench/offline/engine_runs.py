"""Runs requests on our engine in this process, and measures the time of each run."""

import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tqdm import tqdm

from nanovllm_core import AsyncEngine, EngineConfig, EngineStats, ModelSpec, Request, SamplingParams
from nanovllm_server.bench.workload import TokenRequest

# After this many tokens, all kernels for prefill and decode are compiled.
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class RunTiming:
    """Times of one run, in seconds since all requests were submitted.

    num_tokens: output tokens of all requests.
    last_token_s: time of the last token of all requests.
    all_first_tokens_s: time at which every request had its first token; None if not measured.
    acceptance_length: mean number of tokens that a request got from a step with drafts (proposed tokens); None if no
        step had drafts.
    """

    num_tokens: int
    last_token_s: float
    all_first_tokens_s: float | None
    acceptance_length: float | None = None


async def time_engine(
    spec: ModelSpec,
    config: EngineConfig,
    cases: Sequence[Sequence[TokenRequest]],
    temperature: float,
    repeat: int,
    *,
    needs_time_to_all_first_tokens: bool,
) -> list[list[RunTiming]]:
    """Starts an engine and runs the requests of each case `repeat` times after a warm-up. Returns the timings by case.

    needs_time_to_all_first_tokens: if True, measure `all_first_tokens_s` in an extra run with one output token per
        request. vLLM, which reports only the end of a run, is measured in the same way.

    Raises ConfigError, ModelError, RequestError (a request does not fit) and EngineDeadError.
    """
    engine = await AsyncEngine.start(spec, config)
    # Garbage collection of all objects of torch and the model would stop every request for 0.2 s.
    gc.collect()
    gc.freeze()
    try:
        timings_by_case: list[list[RunTiming]] = []
        for index, requests in enumerate(cases):
            name = f"nanovllm, case {index + 1}/{len(cases)}"
            await _run(engine, _with_max_tokens(requests, WARM_UP_TOKENS), temperature, f"{name}, warm-up")
            timings: list[RunTiming] = []
            for repetition in range(repeat):
                label = f"{name}, run {repetition + 1}/{repeat}"
                all_first_tokens_s = None
                if needs_time_to_all_first_tokens:
                    first_label = f"{label}, first tokens"
                    _, all_first_tokens_s = await _run(engine, _with_max_tokens(requests, 1), temperature, first_label)
                before = engine.stats
                num_tokens, last_token_s = await _run(engine, requests, temperature, label)
                acceptance_length = _find_acceptance_length(before, engine.stats)
                timings.append(RunTiming(num_tokens, last_token_s, all_first_tokens_s, acceptance_length))
            timings_by_case.append(timings)
        return timings_by_case
    finally:
        await engine.stop()


def _find_acceptance_length(before: EngineStats, after: EngineStats) -> float | None:
    # Each step in which a request has drafts verifies one draft at position 0.
    num_verifications = sum(after.verified_drafts_by_position[:1]) - sum(before.verified_drafts_by_position[:1])
    if num_verifications == 0:
        return None
    return 1 + (sum(after.accepted_drafts_by_position) - sum(before.accepted_drafts_by_position)) / num_verifications


def _with_max_tokens(requests: Sequence[TokenRequest], max_tokens: int) -> list[TokenRequest]:
    return [TokenRequest(request.prompt, min(request.max_tokens, max_tokens)) for request in requests]


async def _run(
    engine: AsyncEngine, token_requests: Sequence[TokenRequest], temperature: float, label: str
) -> tuple[int, float]:
    """Submits all requests at once. Returns the number of output tokens, and the seconds until the last token."""
    requests = [
        Request(
            id=str(index),
            token_ids=request.prompt,
            sampling=SamplingParams(max_tokens=request.max_tokens, temperature=temperature, ignore_eos=True),
            # Only requests of the same run share cached prefixes.
            cache_salt=label,
        )
        for index, request in enumerate(token_requests)
    ]
    for request in requests:
        engine.check(request)
    num_output_tokens = sum(request.max_tokens for request in token_requests)
    with tqdm(total=num_output_tokens, desc=label, unit="tok", disable=not sys.stderr.isatty()) as bar:
        start = time.perf_counter()

        async def count_tokens(request: Request) -> int:
            num_tokens = 0
            async with aclosing(engine.generate(request)) as outputs:
                async for output in outputs:
                    num_tokens += len(output.new_token_ids)
                    bar.update(len(output.new_token_ids))
            return num_tokens

        counts = await asyncio.gather(*map(count_tokens, requests))
        return sum(counts), time.perf_counter() - start
