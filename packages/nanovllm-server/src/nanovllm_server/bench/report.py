"""Prints results as tables, writes them as JSON, and describes the machine and the versions."""

import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

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

# A header and rows, all of the same length.
Table: TypeAlias = Sequence[Sequence[str]]


class BenchError(RuntimeError):
    """A benchmark can't run or has failed. The message gives the reason."""

    exit_status = 1


class InvalidSettingsError(BenchError):
    """The engine refuses the model, its limits or a request."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Files for results, in addition to the terminal; None for no file."""

    json: Path | None = None
    plot: Path | None = None


def report(
    benchmark: str, title: str, tables: Sequence[Table], figures: Mapping[str, JSON], files: OutputFiles
) -> None:
    """Prints the tables and writes the figures, both with the machine and the versions."""
    environment = describe_environment()
    print_tables(
        title, ", ".join(f"{name} {value}" for name, value in environment.items() if value is not None), tables
    )
    write_json(files.json, {"benchmark": benchmark, "environment": environment, **figures})


def describe_environment() -> dict[str, JSON]:
    """The machine and the versions of this measurement."""
    # The import takes seconds and must not precede the run of a peer.
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": f"{processor_name()}, {os.cpu_count()} cores" + (f", {gpu}" if gpu else ""),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{package: _installed_version(package) for package in PACKAGES},
    }


def processor_name() -> str:
    """The name of the processor, or of its architecture if the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_tables(title: str, subtitle: str, tables: Sequence[Table]) -> None:
    """Prints the title, the subtitle and the tables to stdout."""
    lines = [title, subtitle]
    for table in tables:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", *("  ".join(map(str.rjust, row, widths)) for row in table)]
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def print_message(text: str) -> None:
    """Prints progress or a warning to stderr."""
    sys.stderr.write(f"nanovllm-bench: {text}\n")
    sys.stderr.flush()


def write_json(path: Path | None, figures: Mapping[str, JSON]) -> None:
    """Writes the figures as JSON. path: None for no file."""
    if path is not None:
        path.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, with linear interpolation."""
    position = percent / 100 * (len(ordered) - 1)
    below = ordered[math.floor(position)]
    return below + (ordered[math.ceil(position)] - below) * (position % 1)


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
