"""Adjusts logits by penalties, biases and masks, draws tokens with filters, and computes log-probabilities.

Functions whose names end in "_" change the logits in place. The random numbers depend only on (seed, position, token
id), not on the batch or the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.sampling import sampling_reference
from nanovllm_kernels.sampling.draw_settings import IN_PROMPT_BIT, MIN_TEMPERATURE, DrawSettings

__all__ = [
    "IN_PROMPT_BIT",
    "MIN_TEMPERATURE",
    "DrawSettings",
    "Logprobs",
    "apply_bias_",
    "apply_masks_",
    "apply_penalties",
    "compute_logprobs",
    "compute_ranks",
    "forbid_sequences_",
    "sample",
]


class Logprobs(NamedTuple):
    """Log-probabilities of B rows.

    chosen: float32 [B], log-probability of the token that the caller chose for each row.
    top_ids: int32 [B, n], the n likeliest tokens of each row, the likeliest token first.
    top_logprobs: float32 [B, n], log-probabilities of `top_ids`.
    """

    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def apply_penalties(
    logits: Tensor, rows: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Lower the probabilities of tokens that already occurred. Returns new float32 logits [B, V].

    logits: [B, V]. rows: int32 [B], each request's row in `counts` and in the three tables of penalties.
    counts: int32 [R, V], number of times that each token id was generated, plus IN_PROMPT_BIT for tokens of the prompt.
    repetition: float32 [R], 1 for off. For tokens in the prompt or the output, positive logits are divided by this
        factor, and negative logits are multiplied by it (Keskar et al. 2019).
    presence: float32 [R], 0 for off. Subtracted from the logit of each token that was generated at least once.
    frequency: float32 [R], 0 for off. Subtracted from a token's logit each time that the token was generated.
    """
    if logits.is_cuda:
        return _apply_penalties_op(logits, rows, counts, repetition, presence, frequency)
    return sampling_reference.apply_penalties(logits, rows, counts, repetition, presence, frequency)


def apply_bias_(
    logits: Tensor, rows: Tensor, positions: Tensor, bias_ids: Tensor, bias_values: Tensor, bias_until: Tensor
) -> None:
    """Add biases to logits of single tokens, in place.

    logits: float32 [B, V]. rows: int32 [B], each request's row in the three bias tables.
    positions: int32 or int64 [B], position of each next token.
    bias_ids: int32 [R, K], token ids. The biases of equal ids add up.
    bias_values: float32 [R, K], the biases. -inf forbids a token.
    bias_until: int32 [R, K]. A bias applies at positions below this number. 0 disables the bias.
    """
    if logits.is_cuda:
        _apply_bias_op(logits, rows, positions, bias_ids, bias_values, bias_until)
    else:
        sampling_reference.apply_bias_(logits, rows, positions, bias_ids, bias_values, bias_until)


def apply_masks_(logits: Tensor, mask_rows: Tensor, masks: Tensor) -> None:
    """Write -inf to the logits of tokens that masks forbid, in place.

    Logits of allowed tokens are raised to at least MIN_ALLOWED_LOGIT, because biases may have set all logits to -inf.

    logits: float32 [B, V].
    mask_rows: int32 [M], the row of `logits` that each mask applies to. Rows are unique. -1 for an unused mask.
    masks: int32 [M, ceil(V / 32)]. Bit t % 32 of masks[m, t // 32] allows token t.
    """
    if logits.is_cuda:
        _apply_masks_op(logits, mask_rows, masks)
    else:
        sampling_reference.apply_masks_(logits, mask_rows, masks)


def forbid_sequences_(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt_tokens: Tensor, sequences: Tensor
) -> None:
    """Write -inf to the logits of tokens that would complete a forbidden sequence, in place.

    logits: float32 [B, V]. rows: int32 [B], each request's row in `tokens`, `num_prompt_tokens` and `sequences`.
    positions: int32 or int64 [B], position of each next token.
    tokens: int32 [R, T], each request's prompt and generated tokens.
    num_prompt_tokens: int32 [R], each request's prompt length. A forbidden sequence matches generated tokens only.
    sequences: int32 [R, K, L], forbidden sequences of up to L tokens, padded with -1 on the left.
    """
    if logits.is_cuda:
        _forbid_sequences_op(logits, rows, positions, tokens, num_prompt_tokens, sequences)
    else:
        sampling_reference.forbid_sequences_(logits, rows, positions, tokens, num_prompt_tokens, sequences)


def sample(logits: Tensor, settings: DrawSettings, positions: Tensor, *, all_greedy: bool, any_filter: bool) -> Tensor:
    """Choose one token per row. Returns token ids, int32 [B]. Filters never remove the likeliest token.

    logits: [B, V], at least one finite logit per row. -inf forbids a token.
    positions: int32 or int64 [B], position of each next token.
    all_greedy: whether all temperatures are below MIN_TEMPERATURE. If True, `settings` and `positions` are not read.
    any_filter: whether any row has a filter. If False, top_k, top_p and min_p are not read.
    """
    if logits.is_cuda:
        return _sample_op(logits, *settings, positions, all_greedy, any_filter)
    return sampling_reference.sample(logits, settings, positions, all_greedy, any_filter)


def compute_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Return the log-probabilities of `tokens` (int32 [B]) and of the `num_top` likeliest tokens. logits: [B, V]."""
    if logits.is_cuda:
        return Logprobs(*_logprobs_op(logits, tokens, num_top))
    return Logprobs(*sampling_reference.compute_logprobs(logits, tokens, num_top))


def compute_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank of each row's token, int32 [B]: how many tokens of the row are at least as likely.

    logits: [B, V]. tokens: int32 [B].
    """
    return sampling_reference.compute_ranks(logits, tokens)


@torch.library.custom_op("nanovllm::apply_penalties", mutates_args=())
def _apply_penalties_op(
    logits: Tensor, rows: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    from nanovllm_kernels.sampling import triton_adjust

    return triton_adjust.apply_penalties(logits, rows, counts, repetition, presence, frequency)


_apply_penalties_op.register_fake(lambda logits, *_: logits.new_empty(logits.shape, dtype=torch.float32))


@torch.library.custom_op("nanovllm::apply_bias", mutates_args=("logits",))
def _apply_bias_op(
    logits: Tensor, rows: Tensor, positions: Tensor, bias_ids: Tensor, bias_values: Tensor, bias_until: Tensor
) -> None:
    from nanovllm_kernels.sampling import triton_adjust

    triton_adjust.apply_bias_(logits, rows, positions, bias_ids, bias_values, bias_until)


@torch.library.custom_op("nanovllm::apply_masks", mutates_args=("logits",))
def _apply_masks_op(logits: Tensor, mask_rows: Tensor, masks: Tensor) -> None:
    from nanovllm_kernels.sampling import triton_adjust

    triton_adjust.apply_masks_(logits, mask_rows, masks)


@torch.library.custom_op("nanovllm::forbid_sequences", mutates_args=("logits",))
def _forbid_sequences_op(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt_tokens: Tensor, sequences: Tensor
) -> None:
    from nanovllm_kernels.sampling import triton_adjust

    triton_adjust.forbid_sequences_(logits, rows, positions, tokens, num_prompt_tokens, sequences)


@torch.library.custom_op("nanovllm::sample", mutates_args=())
def _sample_op(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    all_greedy: bool,
    any_filter: bool,
) -> Tensor:
    from nanovllm_kernels.sampling import triton_sample

    settings = DrawSettings(temperature, top_k, top_p, min_p, seeds)
    return triton_sample.sample(logits, settings, positions, all_greedy, any_filter)


_sample_op.register_fake(lambda logits, *_: logits.new_empty(logits.shape[:1], dtype=torch.int32))


@torch.library.custom_op("nanovllm::logprobs", mutates_args=())
def _logprobs_op(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    from nanovllm_kernels.sampling import triton_logprobs

    return triton_logprobs.compute_logprobs(logits, tokens, num_top)


@_logprobs_op.register_fake
def _(logits: Tensor, _tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = logits.shape[0]
    return (
        logits.new_empty((num_rows,), dtype=torch.float32),
        logits.new_empty((num_rows, num_top), dtype=torch.int32),
        logits.new_empty((num_rows, num_top), dtype=torch.float32),
    )
