"""Measure how fast the kernels run on this GPU, in bytes or operations per second.

    python -m nanovllm_kernels.benchmarks [--json FILE] [--only WORD]

A figure is a kernel's median time per call, and its rate. The median is over replays of a CUDA graph, which calls the
kernel on several copies of random inputs. The copies together exceed the L2 cache. Bytes and operations are the minimum
that the result requires.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from nanovllm_kernels.benchmarks.attention import latent_cases, paged_cases
from nanovllm_kernels.benchmarks.captured_attention import captured_cases
from nanovllm_kernels.benchmarks.drafts import draft_cases
from nanovllm_kernels.benchmarks.gemm import MODEL_WIDTHS, block_fp8_cases, linear_cases
from nanovllm_kernels.benchmarks.linear_attention import delta_net_cases
from nanovllm_kernels.benchmarks.moe import mixture_cases
from nanovllm_kernels.benchmarks.timing import BenchmarkCase, KernelFigure, measure
from nanovllm_kernels.benchmarks.traffic import copy_case, elementwise_cases, sampling_cases
from nanovllm_kernels.platform import describe_device, has_cuda

__all__ = ["KernelFigure", "all_cases", "main", "measure", "select_cases"]


def all_cases() -> Iterator[BenchmarkCase]:
    """Yield all benchmark cases, one kind of kernel after another."""
    yield copy_case()
    yield from paged_cases()
    yield from latent_cases()  # Multi-head latent attention (MLA).
    yield from captured_cases()  # Attention in steps that are captured as CUDA graphs.
    for num_tokens in (256, 8192):
        yield from elementwise_cases(num_tokens)
    for widths in MODEL_WIDTHS:
        for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            yield from linear_cases(widths, num_rows)
    yield from delta_net_cases()  # Gated DeltaNet, a recurrent layer.
    for num_rows in (1, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 4096):
        yield from block_fp8_cases(num_rows)
    yield from mixture_cases()  # Mixtures of experts.
    for batch, vocab_size in ((1, 151_936), (128, 131_072), (256, 151_936)):
        yield from sampling_cases(batch, vocab_size)
    yield from draft_cases()  # Drafts of speculative decoding.


def select_cases(name_part: str) -> list[BenchmarkCase]:
    """Return the cases whose names contain `name_part`, and whose inputs take at most 40% of this GPU's memory."""
    max_input_bytes = 0.4 * describe_device(torch.device("cuda", 0)).total_memory
    return [case for case in all_cases() if name_part in case.name and case.input_bytes <= max_input_bytes]


def main() -> None:
    """Measure the selected cases, and print their figures."""
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm_kernels.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", default="", help="measure only cases whose names contain this word")
    arguments = parser.parse_args()
    if not has_cuda():
        sys.exit("no NVIDIA GPU (Ampere or newer) found: this program measures CUDA kernels")
    device = describe_device(torch.device("cuda", 0))
    print(f"{device.name}, {device.num_sms} SMs, torch {torch.__version__}")  # noqa: T201 - the program's output
    figures = []
    for case in select_cases(arguments.only):
        figures.append(figure := measure(case))
        print(f"{figure.name:44} {figure.microseconds:10.1f} us {figure.rate:9.2f} {figure.unit}", flush=True)  # noqa: T201
    document = json.dumps({"device": asdict(device), "figures": [asdict(figure) for figure in figures]})
    print(document)  # noqa: T201
    if arguments.json:
        arguments.json.write_text(document)
