"""From logits to tokens: penalties, biases, masks, temperature and filters, the draw, and log-probabilities.

`apply_penalties` returns new logits; functions whose names end in "_" change theirs in place. The draw is a stateless
function of (seed, position, token id), see `noise`, so it depends on neither the batch nor the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.sampling import reference

__all__ = [
    "IN_PROMPT",
    "MIN_TEMPERATURE",
    "Logprobs",
    "apply_bias_",
    "apply_masks_",
    "apply_penalties",
    "forbid_",
    "logprobs",
    "ranks",
    "sample",
]

IN_PROMPT = reference.IN_PROMPT
MIN_TEMPERATURE = reference.MIN_TEMPERATURE


class Logprobs(NamedTuple):
    """Log-probabilities of B rows. chosen: float32 [B]. top_ids int32, top_logprobs float32: [B, n], best first."""

    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def apply_penalties(
    logits: Tensor, rows: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Make tokens that already occurred less likely. Returns new float32 logits [B, V].

    logits: [B, V]. rows: int32 [B], each logits row's row in the other arguments, which are tables.
    counts: int32 [R, V]; the low bits count how often each token was generated; IN_PROMPT is set if the prompt has it.
    repetition: float32 [R], 1 for off (Keskar et al. 2019): divides positive logits, and multiplies negative ones, of
        tokens in the prompt or the output.
    presence, frequency: float32 [R], 0 for off: subtracted once if the token was generated, and once per time it was
        generated, as OpenAI's API documents. The prompt does not count. Applied after the repetition penalty.

    A row with all three off keeps its logits bit by bit; on CUDA its counts are not read.
    """
    if logits.is_cuda:
        return _apply_penalties_op(logits, rows, counts, repetition, presence, frequency)
    return reference.apply_penalties(logits, rows, counts, repetition, presence, frequency)


def apply_bias_(
    logits: Tensor, rows: Tensor, positions: Tensor, bias_ids: Tensor, bias_values: Tensor, bias_until: Tensor
) -> None:
    """Add biases to logits of single tokens, in place.

    logits: float32 [B, V]. rows: int32 [B], each logits row's row in the tables.
    positions: int32 or int64 [B], of the next token.
    bias_ids int32, bias_values float32, bias_until int32, each [R, K]: entry (id, value, until) applies while the
        position is below `until`; unused entries have until = 0. Values of repeated ids add up. -inf forbids a token.
    """
    if logits.is_cuda:
        _apply_bias_op(logits, rows, positions, bias_ids, bias_values, bias_until)
    else:
        reference.apply_bias_(logits, rows, positions, bias_ids, bias_values, bias_until)


def apply_masks_(logits: Tensor, which: Tensor, masks: Tensor) -> None:
    """Forbid tokens in some rows, in place.

    logits: float32 [B, V]. which: int32 [M], the row of `logits` for each mask, unique; -1 for an unused mask.
    masks: int32 [M, ceil(V / 32)]: token t is allowed in row which[m] if bit t % 32 of masks[m, t // 32] is set.
        Forbidden logits become -inf. An allowed logit of -inf becomes a large negative number: if a bias forbids all
        tokens that a mask allows, the mask wins.
    """
    if logits.is_cuda:
        _apply_masks_op(logits, which, masks)
    else:
        reference.apply_masks_(logits, which, masks)


def forbid_(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt: Tensor, sequences: Tensor
) -> None:
    """Forbid tokens that would complete a forbidden sequence, in place.

    logits: float32 [B, V]. rows: int32 [B], each logits row's row in the tables.
    positions: int32 or int64 [B], of the next token.
    tokens: int32 [R, T], all known tokens. num_prompt: int32 [R]; prompt tokens are not part of a sequence.
    sequences: int32 [R, K, L], each right-aligned and padded with -1; unused ones are all -1.
    """
    if logits.is_cuda:
        _forbid_op(logits, rows, positions, tokens, num_prompt, sequences)
    else:
        reference.forbid_(logits, rows, positions, tokens, num_prompt, sequences)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    all_greedy: bool,
    any_filter: bool,
) -> Tensor:
    """Choose one token per row. Returns int32 [B].

    logits: [B, V]; -inf forbids a token; each row needs at least one finite logit.
    temperature: float32 [B], applied first. Below MIN_TEMPERATURE: the likeliest token (the lowest id among equals).
    top_k: int32 [B], 0 for off: keeps the logits >= the k-th largest, including ties.
    top_p: float32 [B], 1 for off: keeps the smallest set {p >= t} with a mass of at least top_p, of what top-k keeps
        (Holtzman et al. 2020).
    min_p: float32 [B], 0 for off: keeps p >= min_p * max(p) (Nguyen et al. 2024). No filter drops the likeliest token.
    seeds: int64 [B]. positions: int32 or int64 [B], of the next token.
    all_greedy: every temperature is below MIN_TEMPERATURE; other tensors are then not read and may have any length.
    any_filter: some row has a filter on; if False, top_k, top_p and min_p are not read.
    """
    if logits.is_cuda:
        return _sample_op(logits, temperature, top_k, top_p, min_p, seeds, positions, all_greedy, any_filter)
    return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, positions, all_greedy, any_filter)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Return log-probabilities, float32 log_softmax(logits), of `tokens` and of the `num_top` likeliest tokens.

    logits: [B, V]. tokens: int32 [B]. num_top: 0 .. V.
    """
    if logits.is_cuda:
        return Logprobs(*_logprobs_op(logits, tokens, num_top))
    return Logprobs(*reference.logprobs(logits, tokens, num_top))


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank of each of `tokens`: int32 [B], the number of tokens at least as likely, 1 for the likeliest.

    logits: [B, V]. tokens: int32 [B]. Plain torch on every device, because it is rare and one pass over the logits.
    """
    return reference.ranks(logits, tokens)


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
def _apply_masks_op(logits: Tensor, which: Tensor, masks: Tensor) -> None:
    from nanovllm_kernels.sampling import triton_adjust

    triton_adjust.apply_masks_(logits, which, masks)


@torch.library.custom_op("nanovllm::forbid", mutates_args=("logits",))
def _forbid_op(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt: Tensor, sequences: Tensor
) -> None:
    from nanovllm_kernels.sampling import triton_adjust

    triton_adjust.forbid_(logits, rows, positions, tokens, num_prompt, sequences)


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

    return triton_sample.sample(logits, temperature, top_k, top_p, min_p, seeds, positions, all_greedy, any_filter)


_sample_op.register_fake(lambda logits, *_: logits.new_empty(logits.shape[:1], dtype=torch.int32))


@torch.library.custom_op("nanovllm::logprobs", mutates_args=())
def _logprobs_op(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    from nanovllm_kernels.sampling import triton_logprobs

    return triton_logprobs.logprobs(logits, tokens, num_top)


@_logprobs_op.register_fake
def _(logits: Tensor, _tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = logits.shape[0]
    return (
        logits.new_empty((num_rows,), dtype=torch.float32),
        logits.new_empty((num_rows, num_top), dtype=torch.int32),
        logits.new_empty((num_rows, num_top), dtype=torch.float32),
    )
