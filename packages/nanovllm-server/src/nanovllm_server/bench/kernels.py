"""Runs the kernel benchmarks of `nanovllm_kernels.ladder`, and writes the results as a table, JSON and a plot."""

import sys
from dataclasses import asdict, replace

import torch
from tqdm import tqdm

from nanovllm_kernels import ladder
from nanovllm_kernels.platform import describe_device, has_cuda
from nanovllm_server.bench import plot
from nanovllm_server.bench.report import BenchError, Results, keep, machine, median, one_line, show


def run(only: str, repeat: int, results: Results) -> None:
    """Measures the kernels with `only` in their names. Raises BenchError."""
    if not has_cuda():
        raise BenchError("kernels needs an NVIDIA GPU")
    works = ladder.selected(only)
    if not works:
        raise BenchError(f"no kernel has {only!r} in its name")
    figures: list[ladder.Figure] = []
    for work in tqdm(works, desc="kernels", unit="kernel", disable=not sys.stderr.isatty()):
        runs = [ladder.measure(work) for _ in range(repeat)]
        figures.append(
            replace(
                runs[0],
                microseconds=median(run.microseconds for run in runs),
                rate=median(run.rate for run in runs),
            )
        )
    facts = machine()
    header = ["kernel", "us", "rate", ""]
    rows = [[figure.name, f"{figure.microseconds:.1f}", f"{figure.rate:.2f}", figure.unit] for figure in figures]
    show(f"kernels, median of {repeat}", one_line(facts), [header, *rows])
    keep(
        results.json,
        {
            "benchmark": "kernels",
            "environment": facts,
            "device": asdict(describe_device(torch.device("cuda", 0))),
            "repeat": repeat,
            "figures": [asdict(figure) for figure in figures],
        },
    )
    if results.plot is not None:
        panels: dict[str, dict[str, float]] = {}
        for figure in figures:
            panels.setdefault(figure.unit, {})[figure.name] = figure.rate
        plot.ladder(results.plot, "kernels", panels)
