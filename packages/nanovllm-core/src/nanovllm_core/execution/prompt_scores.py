"""Log-probabilities of prompt tokens, computed on the device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.sampling import compute_logprobs, compute_ranks

SCORE_CHUNK_TOKENS = 128  # maximum number of prompt tokens whose logits are in memory at once


class PromptScores(NamedTuple):
    """Log-probabilities of n tokens of a prompt, on the device or on the host. Shapes: see `PromptLogprobs`."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def score_prompt_tokens(
    hidden: Tensor,
    tokens: Tensor,
    num_top: int,
    compute_logits_of_own_rows: Callable[[Tensor], Tensor],
    parallel: ParallelContext,
) -> PromptScores:
    """Log-probabilities of prompt tokens, and of the `num_top` likeliest tokens at their positions.

    hidden: [n, hidden], hidden states at the positions before the tokens.
    tokens: int32 [n].
    compute_logits_of_own_rows: see `ForwardPass.compute_logits_of_own_rows`.
    """

    def score_chunk(hidden: Tensor, tokens: Tensor) -> PromptScores:
        logits, own_tokens = compute_logits_of_own_rows(hidden), parallel.own_rows(tokens)
        result = compute_logprobs(logits, own_tokens, num_top)
        own_scores = result.chosen, compute_ranks(logits, own_tokens), result.top_ids, result.top_logprobs
        return PromptScores(*(parallel.gather_rows(scores, len(tokens)) for scores in own_scores))

    chunks = map(score_chunk, hidden.split(SCORE_CHUNK_TOKENS), tokens.split(SCORE_CHUNK_TOKENS))
    return PromptScores(*map(torch.cat, zip(*chunks, strict=True)))
