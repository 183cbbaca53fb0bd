"""From logits to tokens: penalties, biases, masks, temperature and filters, the draw, log-probabilities.

`apply_penalties` returns new logits; names that end in "_" change theirs in place. The draw is a stateless function of
(seed, position, token id), see `noise`, so that it depends on neither the batch nor the device.
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
    """Log-probabilities of B rows: chosen float32 [B]; top_ids int32 and top_logprobs float32 [B, n], best first."""

    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def apply_penalties(
    logits: Tensor, rows: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Make tokens that occurred less likely. Returns new float32 logits [B, V].

    logits: [B, V]. rows: int32 [B], the row of each in the tables, which the other arguments are.
    counts: int32 [R, V], how often each token was made in the low bits, plus IN_PROMPT where the prompt has it.
    repetition: float32 [R], 1 for off (Keskar et al. 2019): what a positive logit of a token in prompt or output is
        divided by, and a negative one multiplied.
    presence, frequency: float32 [R], 0 for off: subtracted once if the token was made, and once for each time it
        was, as OpenAI's API documents them. The prompt doesn't count. They come after the repetition penalty.

    A row with all three off keeps its logits bit by bit, whatever its counts; on CUDA the counts are not read.
    """
    if logits.is_cuda:
        return _apply_penalties_op(logits, rows, counts, repetition, presence, frequency)
    return reference.apply_penalties(logits, rows, counts, repetition, presence, frequency)


def apply_bias_(
    logits: Tensor, rows: Tensor, positions: Tensor, bias_ids: Tensor, bias_values: Tensor, bias_until: Tensor
) -> None:
    """Add biases to single tokens' logits, in place.

    logits: float32 [B, V]. rows: int32 [B], each one's row in the tables. positions: int32 or int64 [B], of the token
        to come.
    bias_ids int32, bias_values float32, bias_until int32, each [R, K]: entry (id, value, until) counts while the
        position is below `until`; unused entries have until = 0. Ids may repeat in a row: their values add up.
        -inf forbids.
    """
    if logits.is_cuda:
        _apply_bias_op(logits, rows, positions, bias_ids, bias_values, bias_until)
    else:
        reference.apply_bias_(logits, rows, positions, bias_ids, bias_values, bias_until)


def apply_masks_(logits: Tensor, which: Tensor, masks: Tensor) -> None:
    """Forbid tokens in some rows, in place.

    logits: float32 [B, V]. which: int32 [M], the rows of `logits` that have a mask, none of them twice; -1 for a mask
        of no row.
    masks: int32 [M, ceil(V / 32)]: token t is allowed in row which[m] where bit t % 32 of masks[m, t // 32] is set.
        Forbidden ones become -inf. Allowed ones stay as they are but for -inf, which becomes a large negative number:
        where a bias forbids all that a mask allows, the mask decides.
    """
    if logits.is_cuda:
        _apply_masks_op(logits, which, masks)
    else:
        reference.apply_masks_(logits, which, masks)


def forbid_(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt: Tensor, sequences: Tensor
) -> None:
    """Make tokens impossible that would end a forbidden sequence, in place.

    logits: float32 [B, V]. rows: int32 [B], each one's row in the tables. positions: int32 or int64 [B], of the token
        to come.
    tokens: int32 [R, T], all that is known of each row. num_prompt: int32 [R]; what lies before is no part of a
        sequence.
    sequences: int32 [R, K, L], each at the end of its L; what comes before it, and all of an unused one, is -1.
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
    """Choose a token a row. Returns int32 [B].

    logits: [B, V]; -inf forbids a token, and at least one a row must be finite.
    temperature: float32 [B], below MIN_TEMPERATURE for the likeliest token (the lowest id among equals). Applied first.
    top_k: int32 [B], 0 for off: keeps the logits no less than the k-th largest (so that ties stay).
    top_p: float32 [B], 1 for off: of what top-k left, keeps the smallest set {p >= t} whose mass is at least top_p
        (Holtzman et al. 2020). min_p: float32 [B], 0 for off: keeps p >= min_p * max(p) (Nguyen et al. 2024). The
        likeliest token always stays.
    seeds: int64 [B]. positions: int32 or int64 [B], of the token to come.
    all_greedy: the host knows that every temperature is below MIN_TEMPERATURE; then only the logits are looked at, and
        the other tensors may have any length. any_filter: the host knows that some row has a filter on; when False,
        top_k, top_p and min_p are not looked at.
    """
    if logits.is_cuda:
        return _sample_op(logits, temperature, top_k, top_p, min_p, seeds, positions, all_greedy, any_filter)
    return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, positions, all_greedy, any_filter)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities under log_softmax(logits), in float32: of `tokens`, and of the `num_top` likeliest.

    logits: [B, V]. tokens: int32 [B]. num_top: 0 .. V.
    """
    if logits.is_cuda:
        return Logprobs(*_logprobs_op(logits, tokens, num_top))
    return Logprobs(*reference.logprobs(logits, tokens, num_top))


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """How likely `tokens` are among all: int32 [B], of each how many are at least as likely, so 1 for the likeliest.

    logits: [B, V]. tokens: int32 [B]. Plain torch on every device: few ask for it, and one pass over the logits is all
    it takes.
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
