"""Computes log-probabilities on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of logits that a program processes per iteration.
BLOCK = 4096


def compute_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the package's `compute_logprobs`."""
    num_rows, vocab_size = logits.shape
    chosen_logprobs = logits.new_empty((num_rows,), dtype=torch.float32)
    normalizer = torch.empty_like(chosen_logprobs)
    _compute_chosen_logprobs[(num_rows,)](
        logits, tokens, chosen_logprobs, normalizer, logits.stride(0), vocab_size, BLOCK=BLOCK, num_warps=16
    )
    if num_top == 0:
        return chosen_logprobs, tokens.new_empty((num_rows, 0)), chosen_logprobs.new_empty((num_rows, 0))
    top_values, top_ids = logits.topk(num_top, dim=-1)
    return chosen_logprobs, top_ids.to(torch.int32), top_values.float() - normalizer.unsqueeze(1)


@triton.jit
def _compute_chosen_logprobs(
    logits_ptr, tokens_ptr, chosen_logprobs_ptr, normalizer_ptr, logits_stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    lanes = tl.arange(0, BLOCK)
    # Each lane has its own maximum and sum. The initial maximum is finite, because -inf minus -inf is NaN.
    lane_max = tl.full([BLOCK], -3.0e38, dtype=tl.float32)
    lane_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for first_token in tl.range(0, vocab_size, BLOCK):
        tokens = first_token + lanes
        logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, logits)
        lane_sum = lane_sum * tl.exp(lane_max - new_max) + tl.exp(logits - new_max)
        lane_max = new_max
    row_max = tl.max(lane_max, 0)
    normalizer = row_max + tl.log(tl.sum(lane_sum * tl.exp(lane_max - row_max), 0))
    chosen_logit = tl.load(logits_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(normalizer_ptr + row, normalizer)
    tl.store(chosen_logprobs_ptr + row, chosen_logit - normalizer)
