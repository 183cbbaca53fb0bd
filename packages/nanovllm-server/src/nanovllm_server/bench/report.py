"""Shows results as tables, writes them as JSON, and describes the machine and the versions."""

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
    """A benchmark can't run or has failed. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Results:
    """Files for results, in addition to the terminal; None for no file."""

    json: Path | None
    plot: Path | None


def machine() -> dict[str, JSON]:
    """The machine and the versions of this measurement."""
    # The import takes seconds and must not precede the run of a peer.
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
    """The name of the processor, or of its architecture if the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(title: str, facts: str, *tables: Sequence[Sequence[str]]) -> None:
    """Prints title, facts and tables. A table is a header followed by rows."""
    lines = [title, facts]
    for table in tables:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", *("  ".join(map(str.rjust, row, widths)) for row in table)]
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def one_line(facts: dict[str, JSON]) -> str:
    """The facts of `machine` in one line, without those that are None."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def keep(path: Path | None, result: dict[str, JSON]) -> None:
    """Writes the result as JSON. path: None for no file."""
    if path is not None:
        path.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")


def median(values: Iterable[float]) -> float:
    """The median of the values."""
    return statistics.median(values)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, with linear interpolation."""
    at = percent / 100 * (len(ordered) - 1)
    below = ordered[math.floor(at)]
    return below + (ordered[math.ceil(at)] - below) * (at % 1)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
