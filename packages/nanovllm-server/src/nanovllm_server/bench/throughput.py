"""nano-bench: many requests at once, of random lengths; how many tokens a second come out over the whole of it."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import nanovllm_models
from nanovllm_core import AsyncEngine, EngineConfig, ModelSpec
from nanovllm_server.bench.workload import Timing, Work, keep, nano_bench, run_all, show

TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputJob:
    """What to measure."""

    model: Path
    num_requests: int
    min_len: int
    max_len: int
    load_format: Literal["auto", "dummy"]
    engine: EngineConfig
    json: Path | None


def run(job: ThroughputJob) -> None:
    """Measure, show a table, keep the figures."""
    spec = nanovllm_models.load(job.model, load_format=job.load_format)
    works = nano_bench(job.num_requests, job.min_len, job.max_len, spec.vocab_size)
    context = min(spec.max_position, 2 * job.max_len)
    config = replace(job.engine, max_model_len=context)
    timing = asyncio.run(_measure(spec, config, works))
    rate = timing.num_tokens / timing.last
    prompt_tokens = sum(len(work.prompt) for work in works)
    show(
        f"nano-bench, {job.model.name}, {job.num_requests} requests of {job.min_len}..{job.max_len} tokens in and out",
        ("tokens in", "tokens out", "seconds", "output tok/s"),
        [(str(prompt_tokens), str(timing.num_tokens), f"{timing.last:.2f}", f"{rate:.1f}")],
    )
    keep(
        job.json,
        {
            "benchmark": "throughput",
            "model": job.model.name,
            "num_requests": job.num_requests,
            "prompt_tokens": prompt_tokens,
            "output_tokens": timing.num_tokens,
            "seconds": timing.last,
            "output_tokens_per_second": rate,
        },
    )


async def _measure(spec: ModelSpec, config: EngineConfig, works: list[Work]) -> Timing:
    engine = await AsyncEngine.start(spec, config)
    try:
        await run_all(engine, [Work((1, 2, 3), 4)], TEMPERATURE, "warm-up")
        return await run_all(engine, works, TEMPERATURE, "nano-bench")
    finally:
        await engine.stop()
