"""The command `kernels`: runs `nanovllm_kernels.benchmarks`, which measures our kernels with sizes of real models."""

import sys
from dataclasses import asdict, replace
from statistics import median

import torch
from tqdm import tqdm

from nanovllm_kernels import benchmarks
from nanovllm_kernels.platform import describe_device, has_cuda
from nanovllm_server.bench import charts
from nanovllm_server.bench.report import BenchError, OutputFiles, report


def run(name_part: str, repeat: int, files: OutputFiles) -> None:
    """Measures the kernels whose names contain `name_part`. Raises BenchError without a GPU, or if no name matches."""
    if not has_cuda():
        raise BenchError("kernels needs an NVIDIA GPU")
    if not (cases := benchmarks.select_cases(name_part)):
        raise BenchError(f"no kernel has {name_part!r} in its name")
    figures: list[benchmarks.KernelFigure] = []  # A figure is one kernel's time and its rate in `unit`.
    for case in tqdm(cases, desc="kernels", unit="kernel", disable=not sys.stderr.isatty()):
        runs = [benchmarks.measure(case) for _ in range(repeat)]
        microseconds, rate = median(run.microseconds for run in runs), median(run.rate for run in runs)
        figures.append(replace(runs[0], microseconds=microseconds, rate=rate))
    rows = [[figure.name, f"{figure.microseconds:.1f}", f"{figure.rate:.2f}", figure.unit] for figure in figures]
    report(
        "kernels",
        f"kernels, median of {repeat}",
        [[["kernel", "us", "rate", ""], *rows]],
        {
            "device": asdict(describe_device(torch.device("cuda", 0))),
            "repeat": repeat,
            "figures": [asdict(figure) for figure in figures],
        },
        files,
    )
    if files.plot is not None:
        rates_by_unit: dict[str, dict[str, float]] = {}
        for figure in figures:
            rates_by_unit.setdefault(figure.unit, {})[figure.name] = figure.rate
        charts.draw_panels_of_bars(files.plot, "kernels", rates_by_unit)
