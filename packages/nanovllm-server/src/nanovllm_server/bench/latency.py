"""How fast a few requests decode, beside transformers on the same weights in the same run.

The rate is what was made between the first token and the last: batch * (output - 1) / (last - first).
"""

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch

import nanovllm_models
from nanovllm_core import AsyncEngine, EngineConfig, ModelSpec
from nanovllm_server.bench.workload import Work, keep, median, random_prompts, run_all, show


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyJob:
    """What to measure. `engine` says the device and dtype, for the peer too."""

    model: Path
    batches: tuple[int, ...]
    input_len: int
    output_len: int
    repeat: int
    with_peer: bool
    engine: EngineConfig
    json: Path | None


def run(job: LatencyJob) -> None:
    """Measure, show a table, keep the figures."""
    spec = nanovllm_models.load(job.model)
    device = job.engine.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = str(job.engine.dtype or spec.dtype).removeprefix("torch.")
    prompts = random_prompts(max(job.batches), job.input_len, spec.vocab_size)
    peer = _peer(job, prompts, device, dtype) if job.with_peer else {}
    ours = asyncio.run(_ours(job, prompts, spec))
    rows: list[list[str]] = []
    for batch in job.batches:
        row = [str(batch), f"{median(ours[batch]):.1f}"]
        if batch in peer:
            row += [f"{median(peer[batch]):.1f}", f"{median(ours[batch]) / median(peer[batch]):.2f}"]
        rows.append(row)
    header = ["batch", "nanovllm tok/s", *(["transformers tok/s", "ratio"] if peer else [])]
    show(
        f"decode, {job.model.name} in {dtype} on {device}, {job.input_len} tokens in, {job.output_len} out, "
        f"median of {job.repeat}",
        header,
        rows,
    )
    keep(
        job.json,
        {
            "benchmark": "latency",
            "model": job.model.name,
            "dtype": dtype,
            "device": device,
            "input_len": job.input_len,
            "output_len": job.output_len,
            "nanovllm": {str(batch): [*rates] for batch, rates in ours.items()},
            "transformers": {str(batch): [*rates] for batch, rates in peer.items()},
        },
    )


async def _ours(job: LatencyJob, prompts: list[list[int]], spec: ModelSpec) -> dict[int, list[float]]:
    engine = await AsyncEngine.start(spec, job.engine)
    rates: dict[int, list[float]] = {}
    try:
        for batch in job.batches:
            works = [Work(tuple(prompt), job.output_len) for prompt in prompts[:batch]]
            await run_all(engine, [Work(work.prompt, 4) for work in works], 0.0, "warm-up")
            rates[batch] = []
            for repetition in range(job.repeat):
                timing = await run_all(engine, works, 0.0, f"batch {batch}, run {repetition + 1}")
                rates[batch].append(batch * (job.output_len - 1) / (timing.last - timing.first))
    finally:
        await engine.stop()
    return rates


def _peer(job: LatencyJob, prompts: list[list[int]], device: str, dtype: str) -> dict[int, list[float]]:
    sys.stderr.write("measuring transformers\n")
    request = {
        "model": str(job.model),
        "device": device,
        "dtype": dtype,
        "batches": job.batches,
        "prompts": prompts,
        "output_len": job.output_len,
        "repeat": job.repeat,
    }
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm_server.bench.peer"],
        input=orjson.dumps(request),
        stdout=subprocess.PIPE,
        check=True,
    )
    return {int(batch): rates for batch, rates in orjson.loads(done.stdout).items()}
