"""What every benchmark shares: prompts, a way to run them and count, and how results are shown and kept.

This room must not know what is compared.
"""

import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

import orjson
import torch
from tqdm import tqdm

from nanovllm_core import AsyncEngine, Request, SamplingParams
from nanovllm_server.protocol.json import JSON

PACKAGES = ("nanovllm-core", "nanovllm-models", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and how many tokens to make after it."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """When tokens came, in seconds since the requests were handed over. `num_tokens` counts all requests' output."""

    num_tokens: int
    first: float
    last: float


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of `length` random tokens, the same ones every time."""
    random = Random(0)
    return [[random.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def nano_bench(count: int, shortest: int, longest: int, vocab_size: int) -> list[Work]:
    """Prompts and outputs of `shortest` to `longest` random tokens; 256 of 100 to 1024 make 133,966 tokens."""
    random = Random(0)
    top = min(10_000, vocab_size - 1)
    prompts = [tuple(random.randint(0, top) for _ in range(random.randint(shortest, longest))) for _ in range(count)]
    return [Work(prompt, random.randint(shortest, longest)) for prompt in prompts]


async def run_all(engine: AsyncEngine, works: Sequence[Work], temperature: float, label: str) -> Timing:
    """Hand all requests over at once and wait for the last token, with a progress bar of tokens."""
    times: list[float] = []
    total = sum(work.max_tokens for work in works)
    with tqdm(total=total, desc=label, unit="tok", disable=not sys.stderr.isatty()) as bar:
        start = time.perf_counter()

        async def one(index: int, work: Work) -> int:
            made = 0
            sampling = SamplingParams(max_tokens=work.max_tokens, temperature=temperature, ignore_eos=True)
            request = Request(id=f"{label}-{index}", token_ids=list(work.prompt), sampling=sampling)
            async with aclosing(engine.generate(request)) as outputs:
                async for output in outputs:
                    if not made or output.finish_reason is not None:
                        times.append(time.perf_counter() - start)
                    made += len(output.new_token_ids)
                    bar.update(len(output.new_token_ids))
            return made

        counts = await asyncio.gather(*(one(index, work) for index, work in enumerate(works)))
    return Timing(sum(counts), min(times), max(times))


def machine() -> dict[str, JSON]:
    """Where and with what this was measured."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores" + (f", {gpu}" if gpu else ""),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table, and above it where it was measured."""
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    sys.stdout.write("\n".join([title, facts, "", *lines, ""]))
    sys.stdout.flush()


def keep(path: Path | None, result: dict[str, JSON]) -> None:
    """Write the result as JSON, if a file was named."""
    if path is not None:
        path.write_bytes(orjson.dumps({"environment": machine(), **result}, option=orjson.OPT_INDENT_2) + b"\n")


def median(values: Sequence[float]) -> float:
    """The middle of the values."""
    return statistics.median(values)
