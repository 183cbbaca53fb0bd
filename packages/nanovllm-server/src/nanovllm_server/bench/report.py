"""Prints results as tables, writes them as JSON, and describes the machine and the versions."""

import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

import orjson

from nanovllm_server.protocol.json import JSON

OWN_PACKAGES = ("nanovllm-server", "nanovllm-models", "nanovllm-core", "nanovllm-kernels")
REPORTED_PACKAGES = (*OWN_PACKAGES, "torch", "triton", "transformers")

# The first row is the header. All rows have the same length.
Table: TypeAlias = Sequence[Sequence[str]]


class BenchError(RuntimeError):
    """A benchmark can't run or has failed. The message gives the reason."""

    exit_status = 1


class InvalidSettingsError(BenchError):
    """The engine refuses the model, a limit or a request; or a flag is invalid, or contradicts another flag."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Files to write results to. json: all figures. plot: a PNG. None for no file."""

    json: Path | None = None
    plot: Path | None = None


def report(
    benchmark: str, title: str, tables: Sequence[Table], results: Mapping[str, JSON], files: OutputFiles
) -> None:
    """Prints the tables and writes JSON. Both outputs name the machine and the versions. benchmark: command name."""
    environment = describe_environment()
    environment_texts = (f"{name} {value}" for name, value in environment.items() if value is not None)
    print_tables(title, ", ".join(environment_texts), tables)
    write_json(files.json, {"benchmark": benchmark, "environment": environment, **results})


def describe_environment() -> dict[str, JSON]:
    """Returns the names of this machine's hardware, and the versions of its software."""
    # Importing torch takes seconds: import it after the measurement.
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": f"{processor_name()}, {os.cpu_count()} cores" + (f", {gpu}" if gpu else ""),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{package: _installed_version(package) for package in REPORTED_PACKAGES},
    }


def processor_name() -> str:
    """Returns the processor's name, or its architecture if the system does not know the name."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


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


def write_json(path: Path | None, results: Mapping[str, JSON]) -> None:
    """Writes the results as JSON. path: None for no file."""
    if path is not None:
        path.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Interpolates a percentile of values in ascending order."""
    position = percent / 100 * (len(sorted_values) - 1)
    value_below = sorted_values[math.floor(position)]
    return value_below + (sorted_values[math.ceil(position)] - value_below) * (position % 1)


def _installed_version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
