"""Chooses tokens from logits and computes log-probabilities, all on the device."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.execution.inputs import to_device
from nanovllm_core.execution.request_table import Needs, RequestTable
from nanovllm_kernels.sampling import (
    DrawSettings,
    apply_bias_,
    apply_masks_,
    apply_penalties,
    compute_logprobs,
    compute_ranks,
    forbid_sequences_,
    sample,
)

# Options that change logits before sampling, besides penalties.
ADJUSTMENTS = int(Needs.BIAS | Needs.FORBID | Needs.MASK)
# Prompt tokens whose logits exist at once. For a vocabulary of 150,000 in float32 these logits take 80 MB.
SCORED_AT_ONCE = 128


class Sampled(NamedTuple):
    """Sampled tokens, with log-probabilities of the m rows that asked for them; None if no row asked.

    tokens: int32 [n].
    chosen: float32 [m], log-probability of each chosen token.
    top_ids, top_logprobs: int32 and float32 [m, k], the likeliest tokens, best first.
    """

    tokens: Tensor
    chosen: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


class PromptScores(NamedTuple):
    """Log-probabilities of n tokens of a prompt, on the device.

    logprobs: float32 [n]. ranks: int32 [n], see `PromptTokenLogprobs`.
    top_ids, top_logprobs: int32 and float32 [n, num_top].
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Masks(NamedTuple):
    """Tokens that some of a step's rows may sample: the arguments `mask_rows` and `masks` of `apply_masks_`."""

    which: Tensor
    bits: Tensor


Gather = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def gather(rows: Tensor, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The entries of each of `columns` [R] at `rows` int32 [n]: one tensor [n] per column."""
    return tuple(column.index_select(0, rows) for column in columns)


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    table: RequestTable,
    needs: int,
    gather_settings: Gather,
    masks: Masks | None = None,
) -> Tensor:
    """Choose a token for each row of `logits` [n, vocab].

    rows: int32 [n], the table rows of the requests.
    positions: int32 [n], the positions of the new tokens.
    needs: `Needs` of all rows combined; flags that no row needs do not change the tokens.
    gather_settings: `gather`, or a compiled version of it.
    masks: tokens that some rows may choose; applied last. None unless `needs` has MASK.
    Returns int32 [n].
    """
    if needs & Needs.PENALTY:
        penalties = table.repetition, table.presence, table.frequency
        logits = apply_penalties(logits, rows, table.counts, *penalties)
    elif needs & ADJUSTMENTS:
        # Log-probabilities are computed from the unchanged logits, so adjust a copy.
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if needs & Needs.BIAS:
        apply_bias_(logits, rows, positions, table.bias_ids, table.bias_values, table.bias_until)
    if needs & Needs.FORBID:
        forbid_sequences_(logits, rows, positions, table.tokens, table.num_prompt, table.forbidden)
    if masks is not None:
        apply_masks_(logits, masks.which, masks.bits)
    settings = (table.temperature, table.top_k, table.top_p, table.min_p, table.seeds)
    if needs & Needs.RANDOM:
        settings = gather_settings(rows, settings)
    all_greedy, any_filter = not needs & Needs.RANDOM, bool(needs & Needs.FILTER)
    return sample(logits, DrawSettings(*settings), positions, all_greedy=all_greedy, any_filter=any_filter)


def with_logprobs(
    tokens: Tensor, logits: Tensor, sampling_indices: NDArray[np.int64], num_logprobs: NDArray[np.int64], most: int
) -> Sampled:
    """Add log-probabilities from the unadjusted logits for the rows that asked for them.

    tokens: [n]. logits: [n, vocab], not changed by penalties or temperature.
    sampling_indices: int64 [m], the rows that sample.
    num_logprobs: int64 [m], how many alternatives each of these rows wants; -1 for no log-probabilities.
    most: the largest of `num_logprobs`.
    """
    if most < 0:
        return Sampled(tokens, None, None, None)
    indices, selected_tokens = sampling_indices[num_logprobs >= 0], tokens
    if indices.size < len(tokens):
        rows = to_device(indices.astype(np.int32), tokens.device).to(tokens.device, non_blocking=True)
        selected_tokens, logits = tokens.index_select(0, rows), logits.index_select(0, rows)
    result = compute_logprobs(logits, selected_tokens, most)
    return Sampled(tokens, result.chosen, result.top_ids, result.top_logprobs)


def score(hidden: Tensor, tokens: Tensor, num_top: int, compute_logits: Callable[[Tensor], Tensor]) -> PromptScores:
    """Log-probabilities of prompt tokens, and of the `num_top` likeliest tokens at their positions.

    hidden: [n, size], hidden states at the positions before the tokens.
    tokens: int32 [n].
    Logits are computed in pieces of SCORED_AT_ONCE tokens, to bound memory.
    """

    def score_piece(hidden: Tensor, tokens: Tensor) -> PromptScores:
        logits = compute_logits(hidden)
        result = compute_logprobs(logits, tokens, num_top)
        return PromptScores(result.chosen, compute_ranks(logits, tokens), result.top_ids, result.top_logprobs)

    pieces = map(score_piece, hidden.split(SCORED_AT_ONCE), tokens.split(SCORED_AT_ONCE))
    return PromptScores(*map(torch.cat, zip(*pieces, strict=True)))
