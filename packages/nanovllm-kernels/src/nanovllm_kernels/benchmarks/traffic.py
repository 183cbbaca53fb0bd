"""Benchmark cases whose cost is memory traffic: a plain copy, the elementwise operators, and sampling."""

from collections.abc import Callable, Iterator

import torch

from nanovllm_kernels.benchmarks.inputs import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, random
from nanovllm_kernels.benchmarks.timing import BenchmarkCase
from nanovllm_kernels.elementwise import plan_rotation, rms_norm, rope_and_cache, silu_and_mul
from nanovllm_kernels.sampling import DrawSettings, sample


def copy_case() -> BenchmarkCase:
    """Make a case of a plain copy, whose rate is the limit for kernels that move bytes."""
    size_bytes = 1 << 30

    def make_call() -> Callable[[], object]:
        source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return BenchmarkCase("copy 1 GiB", make_call, 2 * size_bytes, "TB/s", 2 * size_bytes)


def elementwise_cases(num_tokens: int) -> Iterator[BenchmarkCase]:
    """Yield cases of norm, rotary embedding and gated activation with the shapes of an 8B model."""
    hidden, intermediate = 4096, 14336
    hidden_bytes = num_tokens * hidden * 2
    weight = random(hidden)

    def make_norm() -> Callable[[], object]:
        x = random(num_tokens, hidden)
        return lambda: rms_norm(x, weight, 1e-5)

    def make_rope() -> Callable[[], object]:
        qkv = random(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        positions = torch.randint(0, 8192, (num_tokens,), device="cuda")
        rotation = plan_rotation(torch.randn(8192, HEAD_DIM, device="cuda"), positions)
        num_pages = num_tokens // 16 + 1
        cache_slots = torch.randperm(num_pages * 16, device="cuda")[:num_tokens]
        kv_cache = random(num_pages, 16, 2 * NUM_KV_HEADS, HEAD_DIM)
        return lambda: rope_and_cache(qkv, rotation, cache_slots, kv_cache)

    def make_gate() -> Callable[[], object]:
        x = random(num_tokens, 2 * intermediate)
        return lambda: silu_and_mul(x)

    rope_bytes = num_tokens * (2 * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM * 2 + HEAD_DIM * 4)
    gate_bytes = num_tokens * 3 * intermediate * 2
    yield BenchmarkCase(f"rms_norm {num_tokens} x {hidden}", make_norm, 2 * hidden_bytes, "GB/s", 2 * hidden_bytes)
    yield BenchmarkCase(f"rope_and_cache {num_tokens}", make_rope, rope_bytes, "GB/s", rope_bytes)
    yield BenchmarkCase(f"silu_and_mul {num_tokens} x {intermediate}", make_gate, gate_bytes, "GB/s", gate_bytes)


def sampling_cases(batch: int, vocab_size: int) -> Iterator[BenchmarkCase]:
    """Yield cases of greedy, unfiltered and filtered draws. In the case "flat", top-p keeps most tokens."""
    ones, zeros, row_indices = (fill(batch, device="cuda") for fill in (torch.ones, torch.zeros, torch.arange))
    cost = batch * vocab_size * 4

    def make_draw(temperature: float, top_k: int, top_p: float, logit_std: float) -> Callable[[], Callable[[], object]]:
        def make_call() -> Callable[[], object]:
            logits = torch.randn((batch, vocab_size), device="cuda") * logit_std
            seeds = positions = row_indices  # The values do not affect the time.
            settings = DrawSettings(ones * temperature, (zeros + top_k).int(), ones * top_p, zeros, seeds)
            return lambda: sample(
                logits, settings, positions, all_greedy=temperature == 0, any_filter=top_k > 0 or top_p < 1
            )

        return make_call

    for name, settings in {
        "greedy": (0.0, 0, 1.0, 3.0),
        "gumbel": (0.6, 0, 1.0, 3.0),
        "top-k": (0.6, 50, 1.0, 3.0),
        "top-p": (0.6, 0, 0.9, 3.0),
        "top-p, flat": (0.6, 0, 0.9, 0.5),
        "top-k + top-p": (0.6, 50, 0.9, 3.0),
    }.items():
        yield BenchmarkCase(f"sample {batch} x {vocab_size} {name}", make_draw(*settings), cost, "GB/s", cost)
