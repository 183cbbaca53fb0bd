"""Benchmark cases of Gated DeltaNet, a recurrent layer. The cost is bytes for decodes, and operations for prompts."""

from collections.abc import Callable, Iterator

import torch

from nanovllm_kernels.benchmarks.inputs import random
from nanovllm_kernels.benchmarks.timing import BenchmarkCase
from nanovllm_kernels.linear_attention import DeltaWeights, conv_state_shape, gated_delta_net, plan_states

DELTA_K_HEADS, DELTA_V_HEADS, DELTA_DIM = 16, 32, 128  # Key heads, value heads, and elements per head of Qwen3-Next.


def delta_net_case(
    lengths: list[int], context: int, state_dtype: torch.dtype, *, max_drafts: int = 0, num_pending: int = 0
) -> BenchmarkCase:
    """Make a case of Qwen3-Next's recurrent layer, without its projections.

    lengths: number of new tokens of each request. context: number of tokens of each request before its new tokens.
    max_drafts: drafts per request for which the caches have space. If positive, a request's new tokens after the first
        are drafts.
    num_pending: number of accepted drafts of each request's previous step.
    """
    batch, num_tokens, values_per_key, dim = len(lengths), sum(lengths), DELTA_V_HEADS // DELTA_K_HEADS, DELTA_DIM
    conv_channels = DELTA_K_HEADS * (2 + values_per_key) * dim
    is_decode = num_tokens == batch or max_drafts > 0

    def make_call() -> Callable[[], object]:
        token_counts = torch.tensor(
            [lengths, [context + length for length in lengths]], dtype=torch.int32, device="cuda"
        )
        state_batch = plan_states(
            torch.randperm(batch, device="cuda").int() + 1,
            torch.zeros((batch, 1, 2), dtype=torch.int32, device="cuda"),
            token_counts[1],
            torch.cat((token_counts.new_zeros(1), token_counts[0].cumsum(0).int())),
            num_decodes=batch if is_decode else 0,
            max_query_len=max(lengths),
            num_tokens=num_tokens,
            backend="triton",
            num_pending=torch.full((batch,), num_pending, dtype=torch.int32, device="cuda") if max_drafts else None,
            has_drafts=num_tokens > batch and max_drafts > 0,
        )
        ones = torch.ones(DELTA_V_HEADS, device="cuda")
        weights = DeltaWeights(random(4, conv_channels).float(), ones, ones, torch.ones(dim, device="cuda"), 1e-6)
        recurrent_states = torch.randn((batch + 1, DELTA_V_HEADS, dim, dim), device="cuda").to(state_dtype)
        conv_states = random(batch + 1, *conv_state_shape(4, conv_channels, DELTA_V_HEADS, max_drafts))
        # ba: the inputs of each value head's two gates.
        ba = random(num_tokens, 2 * DELTA_V_HEADS)
        qkvz = random(num_tokens, conv_channels + DELTA_V_HEADS * dim)
        return lambda: gated_delta_net(qkvz, ba, weights, recurrent_states, conv_states, state_batch)

    state_bytes = batch * DELTA_V_HEADS * dim * dim * state_dtype.itemsize
    kind = "decode" if is_decode else f"prefill of {max(lengths)}"
    name = f"delta net {kind} batch {batch} {str(state_dtype).removeprefix('torch.')}"
    if max_drafts:
        name += f", {max(lengths) - 1} drafts, {num_pending} pending"
    if is_decode:
        cost = 2 * state_bytes + num_tokens * (conv_channels * 2 * 5 + 2 * DELTA_V_HEADS * dim * 2)
        return BenchmarkCase(name, make_call, cost, "TB/s", cost)
    input_output_bytes = num_tokens * (conv_channels + 2 * DELTA_V_HEADS * dim) * 2
    return BenchmarkCase(
        name, make_call, num_tokens * DELTA_V_HEADS * 6 * dim * dim, "TFLOP/s", state_bytes + input_output_bytes
    )


def delta_net_cases() -> Iterator[BenchmarkCase]:
    """Yield cases of decodes with states of both dtypes, of drafts, and of prompts."""
    for batch in (1, 8, 64, 256):
        for state_dtype in (torch.float32, torch.bfloat16):
            yield delta_net_case([1] * batch, 1000, state_dtype)
    for batch in (1, 8, 64, 256):
        for num_drafts, num_pending in ((0, 0), (0, 2), (4, 0), (4, 2)):
            lengths = [1 + num_drafts] * batch
            yield delta_net_case(lengths, 1000, torch.float32, max_drafts=4, num_pending=num_pending)
    for lengths in ([8192], [2048] * 4, [64] * 64):
        yield delta_net_case(lengths, 0, torch.float32)
