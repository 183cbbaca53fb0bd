"""The sampling operators in plain torch: the reference for the kernels' tests, and the CPU path.

Passes over the vocabulary dominate: rows without filters are drawn together, others are first reduced to candidates.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.sampling import noise

IN_PROMPT = 1 << 30
MIN_TEMPERATURE = 1e-5
# Smallest logit that a mask leaves for allowed tokens; stays finite when divided by any temperature.
LEAST_ALLOWED = -1e30

# Sorted candidates per row at first, and the factor by which this grows at each retry. Most nuclei are small, and
# sorting the whole vocabulary takes ten times as long as selecting a few hundred tokens.
FIRST_CANDIDATES = 128
WIDENING = 16
# Extra candidates beyond top-k, for ties with the k-th.
TIE_ROOM = 64
# Elements drawn at once: a dozen passes over them stay in the cache.
DRAW_ELEMENTS = 1 << 18


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """See the package's `apply_penalties`."""
    seen = counts.index_select(0, rows)
    factor, once, each = (column.index_select(0, rows).unsqueeze(1) for column in (repetition, presence, frequency))
    out = logits.to(torch.float32, copy=True)
    repeated = torch.where(out > 0, out / factor, out * factor)
    out = torch.where(seen != 0, repeated, out)
    generated = seen.bitwise_and_(IN_PROMPT - 1)
    return out.sub_(once * (generated > 0)).sub_(each * generated)


def apply_bias_(
    logits: Tensor, rows: Tensor, positions: Tensor, bias_ids: Tensor, bias_values: Tensor, bias_until: Tensor
) -> None:
    """See the package's `apply_bias_`."""
    active = positions.unsqueeze(1) < bias_until.index_select(0, rows)
    values = bias_values.index_select(0, rows).masked_fill_(~active, 0.0)
    ids = bias_ids.index_select(0, rows).masked_fill_(~active, 0)
    logits.scatter_add_(1, ids.long(), values)


def apply_masks_(logits: Tensor, which: Tensor, masks: Tensor) -> None:
    """See the package's `apply_masks_`."""
    vocab_size = logits.shape[1]
    for row, mask in zip(which.tolist(), masks, strict=True):
        if row < 0:
            continue
        # Lowest bit first: tokens are in order, because all supported CPUs are little-endian.
        bits = np.unpackbits(mask.contiguous().numpy().view(np.uint8), count=vocab_size, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_))
        logits[row].clamp_(min=LEAST_ALLOWED).masked_fill_(~allowed, -torch.inf)


def forbid_(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt: Tensor, sequences: Tensor
) -> None:
    """See the package's `forbid_`."""
    sequences = sequences.index_select(0, rows)
    begins, ends = sequences[:, :, :-1], sequences[:, :, -1]
    back = torch.arange(1 - sequences.shape[2], 0, device=logits.device)
    at = positions.unsqueeze(1) + back
    known = tokens[rows.unsqueeze(1).long(), at.clamp(min=0).long()]
    # -2 equals no token: tokens of the prompt never match.
    generated = torch.where(at >= num_prompt.index_select(0, rows).unsqueeze(1), known, -2).unsqueeze(1)
    ending = ((begins == generated) | (begins == -1)).all(-1) & (ends >= 0)
    values = torch.zeros_like(ends, dtype=torch.float32).masked_fill_(ending, -torch.inf)
    logits.scatter_add_(1, ends.clamp(min=0).long(), values)


def sample(
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
    """See the package's `sample`."""
    if all_greedy:
        return logits.max(-1).indices.to(torch.int32)
    first_keys, second_keys = noise.row_keys(seeds, positions)
    greedy = temperature < MIN_TEMPERATURE
    divisor = temperature.masked_fill(greedy, 1.0).unsqueeze(1)
    if any_filter:
        drawn = _draw_filtered(logits, divisor, top_k, top_p, min_p, first_keys, second_keys)
    else:
        drawn = _draw(logits, divisor, first_keys.unsqueeze(1), second_keys.unsqueeze(1))
    if greedy.any():
        drawn = torch.where(greedy, logits.max(-1).indices, drawn)
    return drawn.to(torch.int32)


def _draw(logits: Tensor, divisor: Tensor, first_keys: Tensor, second_keys: Tensor) -> Tensor:
    """Draw a token of each row [B, V] by exponential races: the minimum of Exp(1) / p is a draw from p.

    Equivalent to argmax with Gumbel noise, with one logarithm less.
    """
    vocab_size = logits.shape[1]
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    winners = []
    step = max(1, DRAW_ELEMENTS // vocab_size)
    for begin in range(0, logits.shape[0], step):
        rows = slice(begin, begin + step)
        scaled = logits[rows].float() / divisor[rows]
        weights = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
        bits = noise.hash_tokens(token_ids, first_keys[rows], second_keys[rows])
        winners.append(weights.div_(noise.negative_exponentials(bits)).min(-1).indices)
    return winners[0] if len(winners) == 1 else torch.cat(winners)


def _draw_filtered(
    logits: Tensor,
    divisor: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    first_keys: Tensor,
    second_keys: Tensor,
) -> Tensor:
    """Like `_draw`, among the tokens that each row's filters keep."""
    drawn = []
    filters = zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    for row, (row_top_k, row_top_p, row_min_p) in enumerate(filters):
        if row_top_k <= 0 and row_top_p >= 1 and row_min_p <= 0:
            keys = first_keys[row : row + 1, None], second_keys[row : row + 1, None]
            drawn.append(_draw(logits[row : row + 1], divisor[row : row + 1], *keys).squeeze(0))
            continue
        scaled = logits[row].float() / divisor[row]
        values, token_ids = filter_row(scaled, row_top_k, row_top_p, row_min_p)
        weights = (values - values[0]).exp_()
        bits = noise.hash_tokens(token_ids.to(torch.int32), first_keys[row], second_keys[row])
        drawn.append(token_ids[weights.div_(noise.negative_exponentials(bits)).argmin()])
    return torch.stack(drawn)


def filter_row(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """Return the values, falling, and token ids that one row's filters keep of `scaled` [V] (temperature applied)."""
    vocab_size = scaled.shape[0]
    if top_k >= vocab_size:
        top_k = 0
    width = min(top_k + TIE_ROOM if top_k > 0 else FIRST_CANDIDATES, vocab_size)
    while True:
        values, token_ids = scaled.topk(width)
        kept = _count_kept(scaled, values, top_k, top_p, min_p)
        if kept < width or width == vocab_size:
            return values[:kept], token_ids[:kept]
        width = min(width * WIDENING, vocab_size)


def _count_kept(scaled: Tensor, values: Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """Count how many of `values`, the largest of `scaled`, falling, the filters keep. If all, there may be more."""
    weights = (values - values[0]).exp_().double()
    kept = values.shape[0]
    if top_k > 0:
        kept = int((values >= values[top_k - 1]).sum())
    if top_p < 1:
        if kept < values.shape[0] or kept == scaled.shape[0]:
            total = weights[:kept].sum()
        elif top_k > 0:
            # Ties with the k-th may go on beyond `values`: the mass is not known yet.
            return kept
        else:
            total = (scaled - values[0]).exp_().sum(dtype=torch.float64)
        short = int((weights[:kept].cumsum(0) < top_p * total).sum())
        # Due to rounding, even the full sum may be below its share.
        kept = int((values[:kept] >= values[min(short, kept - 1)]).sum())
    if min_p > 0:
        kept = min(kept, int((weights >= min_p).sum()))
    return kept


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the package's `logprobs`."""
    normalizer = logits.float().logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens.long().unsqueeze(1)).float().sub_(normalizer).squeeze(1)
    top_values, top_ids = logits.topk(num_top, dim=-1)
    return chosen, top_ids.to(torch.int32), top_values.float().sub_(normalizer)


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """See the package's `ranks`."""
    return (logits >= logits.gather(1, tokens.long().unsqueeze(1))).sum(1, dtype=torch.int32)
