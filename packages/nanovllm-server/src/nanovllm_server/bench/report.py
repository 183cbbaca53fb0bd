"""How results are shown and kept: tables, JSON, and where and with what they were measured.

This room must not know what is measured.
"""

import math
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson

from nanovllm_server.protocol.json import JSON

PACKAGES = (
    "nanovllm-server",
    "nanovllm-models",
    "nanovllm-core",
    "nanovllm-kernels",
    "torch",
    "triton",
    "transformers",
)


class BenchError(RuntimeError):
    """A benchmark that can't be run, or that failed; the message says why."""


@dataclass(frozen=True, slots=True)
class Results:
    """Where results go beside the terminal: files, if wanted."""

    json: Path | None
    plot: Path | None


def machine() -> dict[str, JSON]:
    """Where and with what this was measured."""
    # Takes seconds, and must not happen before a peer has had its turn.
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores" + (f", {gpu}" if gpu else ""),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in PACKAGES},
    }


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(title: str, facts: str, *tables: Sequence[Sequence[str]]) -> None:
    """Write tables, each a header and its rows, and above them what was measured and where."""
    lines = [title, facts]
    for table in tables:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", *("  ".join(map(str.rjust, row, widths)) for row in table)]
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def one_line(facts: dict[str, JSON]) -> str:
    """What `machine` says, but for what isn't there."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def keep(path: Path | None, result: dict[str, JSON]) -> None:
    """Write the result as JSON, if a file was named."""
    if path is not None:
        path.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")


def median(values: Iterable[float]) -> float:
    """The middle of the values."""
    return statistics.median(values)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of values in rising order, between the two nearest in proportion."""
    at = percent / 100 * (len(ordered) - 1)
    below = ordered[math.floor(at)]
    return below + (ordered[math.ceil(at)] - below) * (at % 1)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
