"""Applies penalties, biases, forbidden sequences and masks on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.sampling.draw_settings import IN_PROMPT_BIT, MIN_ALLOWED_LOGIT

# Number of tokens per program.
BLOCK = 2048
BIASES_PER_PROGRAM = 128
SEQUENCES_PER_PROGRAM = 128


def apply_penalties(
    logits: Tensor, table_rows: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """See the package's `apply_penalties`."""
    num_rows, vocab_size = logits.shape
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    _apply_penalties[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits,
        table_rows,
        counts,
        repetition,
        presence,
        frequency,
        out,
        logits.stride(0),
        counts.stride(0),
        vocab_size,
        IN_PROMPT_BIT=IN_PROMPT_BIT,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def apply_bias_(
    logits: Tensor, table_rows: Tensor, positions: Tensor, bias_ids: Tensor, bias_values: Tensor, bias_until: Tensor
) -> None:
    """See the package's `apply_bias_`."""
    num_biases = bias_ids.shape[1]
    _apply_bias[(logits.shape[0], triton.cdiv(num_biases, BIASES_PER_PROGRAM))](
        logits,
        table_rows,
        positions,
        bias_ids,
        bias_values,
        bias_until,
        logits.stride(0),
        bias_ids.stride(0),
        bias_values.stride(0),
        bias_until.stride(0),
        num_biases,
        BLOCK=BIASES_PER_PROGRAM,
        num_warps=4,
    )


def apply_masks_(logits: Tensor, logits_rows: Tensor, masks: Tensor) -> None:
    """See the package's `apply_masks_`."""
    vocab_size = logits.shape[1]
    _apply_masks[(logits_rows.shape[0], triton.cdiv(vocab_size, BLOCK))](
        logits,
        logits_rows,
        masks,
        logits.stride(0),
        masks.stride(0),
        vocab_size,
        MIN_ALLOWED_LOGIT=MIN_ALLOWED_LOGIT,
        BLOCK=BLOCK,
        num_warps=4,
    )


def forbid_sequences_(
    logits: Tensor, table_rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt_tokens: Tensor, sequences: Tensor
) -> None:
    """See the package's `forbid_sequences_`."""
    _, num_sequences, length = sequences.shape
    _forbid_sequences[(logits.shape[0], triton.cdiv(num_sequences, SEQUENCES_PER_PROGRAM))](
        logits,
        table_rows,
        positions,
        tokens,
        num_prompt_tokens,
        sequences,
        logits.stride(0),
        tokens.stride(0),
        sequences.stride(0),
        num_sequences,
        LENGTH=length,
        BLOCK=SEQUENCES_PER_PROGRAM,
        num_warps=4,
    )


@triton.jit
def _apply_penalties(
    logits_ptr,
    table_rows_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    out_ptr,
    logits_stride,
    counts_stride,
    vocab_size,
    IN_PROMPT_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    logits_row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    table_row = tl.load(table_rows_ptr + logits_row).to(tl.int64)
    repetition = tl.load(repetition_ptr + table_row)
    presence = tl.load(presence_ptr + table_row)
    frequency = tl.load(frequency_ptr + table_row)
    logits = tl.load(logits_ptr + logits_row * logits_stride + tokens, mask=mask, other=0.0).to(tl.float32)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        row_counts = tl.load(counts_ptr + table_row * counts_stride + tokens, mask=mask, other=0)
        penalized = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where(row_counts != 0, penalized, logits)
        generated_counts = (row_counts & (IN_PROMPT_BIT - 1)).to(tl.float32)
        logits -= tl.where(generated_counts > 0, presence, 0.0)
        logits -= generated_counts * frequency
    tl.store(out_ptr + logits_row * vocab_size + tokens, logits, mask=mask)


@triton.jit
def _apply_bias(
    out_ptr,
    table_rows_ptr,
    positions_ptr,
    ids_ptr,
    values_ptr,
    until_ptr,
    out_stride,
    ids_stride,
    values_stride,
    until_stride,
    num_biases,
    BLOCK: tl.constexpr,
):
    logits_row = tl.program_id(0).to(tl.int64)
    bias_indices = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table_row = tl.load(table_rows_ptr + logits_row).to(tl.int64)
    position = tl.load(positions_ptr + logits_row)
    until = tl.load(until_ptr + table_row * until_stride + bias_indices, mask=bias_indices < num_biases, other=0)
    is_active = (bias_indices < num_biases) & (position < until)
    ids = tl.load(ids_ptr + table_row * ids_stride + bias_indices, mask=is_active, other=0)
    values = tl.load(values_ptr + table_row * values_stride + bias_indices, mask=is_active, other=0.0)
    # Ids may repeat, and their biases add up.
    tl.atomic_add(out_ptr + logits_row * out_stride + ids, values, mask=is_active)


@triton.jit
def _apply_masks(
    out_ptr,
    logits_rows_ptr,
    masks_ptr,
    out_stride,
    masks_stride,
    vocab_size,
    MIN_ALLOWED_LOGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    mask_index = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    row = tl.load(logits_rows_ptr + mask_index).to(tl.int64)
    if row < 0:
        return
    words = tl.load(masks_ptr + mask_index * masks_stride + tokens // 32, mask=mask, other=0)
    logits = tl.load(out_ptr + row * out_stride + tokens, mask=mask, other=0.0)
    is_allowed = ((words >> (tokens % 32)) & 1) != 0
    logits = tl.where(is_allowed, tl.maximum(logits, MIN_ALLOWED_LOGIT), float("-inf"))
    tl.store(out_ptr + row * out_stride + tokens, logits, mask=mask)


@triton.jit
def _forbid_sequences(
    out_ptr,
    table_rows_ptr,
    positions_ptr,
    tokens_ptr,
    num_prompt_ptr,
    sequences_ptr,
    out_stride,
    tokens_stride,
    sequences_stride,
    num_sequences,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    logits_row = tl.program_id(0).to(tl.int64)
    sequences = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table_row = tl.load(table_rows_ptr + logits_row).to(tl.int64)
    sequences_ptr += table_row * sequences_stride + sequences * LENGTH
    last_tokens = tl.load(sequences_ptr + LENGTH - 1, mask=sequences < num_sequences, other=-1)
    is_matched = last_tokens >= 0
    if tl.max(is_matched.to(tl.int32), 0) == 0:
        return
    position = tl.load(positions_ptr + logits_row).to(tl.int32)
    num_prompt_tokens = tl.load(num_prompt_ptr + table_row)
    for distance in tl.range(1, LENGTH):
        recent_position = position - distance
        # Prompt tokens are replaced by -2, which no sequence contains. A sequence's padding, -1, matches any token.
        generated = tl.load(
            tokens_ptr + table_row * tokens_stride + recent_position,
            mask=recent_position >= num_prompt_tokens,
            other=-2,
        )
        expected = tl.load(sequences_ptr + LENGTH - 1 - distance, mask=is_matched, other=-1)
        is_matched &= (expected == generated) | (expected == -1)
    tl.store(out_ptr + logits_row * out_stride + last_tokens, float("-inf"), mask=is_matched)
