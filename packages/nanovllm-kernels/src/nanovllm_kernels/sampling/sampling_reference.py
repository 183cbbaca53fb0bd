"""Sampling operators in plain torch: the reference for the kernels' tests, and the CPU path."""

import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.sampling import noise
from nanovllm_kernels.sampling.draw_settings import IN_PROMPT_BIT, MIN_ALLOWED_LOGIT, MIN_TEMPERATURE, DrawSettings

# Filters are first applied to this number of the largest logits, because sorting all logits is slow.
NUM_FIRST_CANDIDATES = 128
# If the filters keep all candidates, the number of candidates is multiplied by this factor.
CANDIDATE_GROWTH = 16
# With top-k, the first candidates are the k + NUM_TIE_CANDIDATES largest logits: some may tie with the k-th largest.
NUM_TIE_CANDIDATES = 64
# Number of logits that `_draw` processes at once. These logits fit the CPU's cache.
DRAW_ELEMENTS = 1 << 18


def apply_penalties(
    logits: Tensor, rows: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """See the package's `apply_penalties`."""
    row_counts = counts.index_select(0, rows)
    repetition, presence, frequency = (
        penalty.index_select(0, rows).unsqueeze(1) for penalty in (repetition, presence, frequency)
    )
    out = logits.to(torch.float32, copy=True)
    penalized = torch.where(out > 0, out / repetition, out * repetition)
    out = torch.where(row_counts != 0, penalized, out)
    generated_counts = row_counts.bitwise_and_(IN_PROMPT_BIT - 1)
    return out.sub_(presence * (generated_counts > 0)).sub_(frequency * generated_counts)


def apply_bias_(
    logits: Tensor, rows: Tensor, positions: Tensor, bias_ids: Tensor, bias_values: Tensor, bias_until: Tensor
) -> None:
    """See the package's `apply_bias_`."""
    is_active = positions.unsqueeze(1) < bias_until.index_select(0, rows)
    values = bias_values.index_select(0, rows).masked_fill_(~is_active, 0.0)
    ids = bias_ids.index_select(0, rows).masked_fill_(~is_active, 0)
    logits.scatter_add_(1, ids.long(), values)


def apply_masks_(logits: Tensor, mask_rows: Tensor, masks: Tensor) -> None:
    """See the package's `apply_masks_`."""
    vocab_size = logits.shape[1]
    for row, mask in zip(mask_rows.tolist(), masks, strict=True):
        if row < 0:
            continue
        # Bytes and bits are in the order of tokens, because all supported CPUs are little-endian.
        bits = np.unpackbits(mask.contiguous().numpy().view(np.uint8), count=vocab_size, bitorder="little")
        is_allowed = torch.from_numpy(bits.view(np.bool_))
        logits[row].clamp_(min=MIN_ALLOWED_LOGIT).masked_fill_(~is_allowed, -torch.inf)


def forbid_sequences_(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, num_prompt_tokens: Tensor, sequences: Tensor
) -> None:
    """See the package's `forbid_sequences_`."""
    sequences = sequences.index_select(0, rows)
    prefixes, last_tokens = sequences[:, :, :-1], sequences[:, :, -1]
    offsets = torch.arange(1 - sequences.shape[2], 0, device=logits.device)
    recent_positions = positions.unsqueeze(1) + offsets
    recent_tokens = tokens[rows.unsqueeze(1).long(), recent_positions.clamp(min=0).long()]
    # Prompt tokens become -2, which is in no sequence.
    is_generated = recent_positions >= num_prompt_tokens.index_select(0, rows).unsqueeze(1)
    generated = torch.where(is_generated, recent_tokens, -2).unsqueeze(1)
    is_matched = ((prefixes == generated) | (prefixes == -1)).all(-1) & (last_tokens >= 0)
    logit_changes = torch.zeros_like(last_tokens, dtype=torch.float32).masked_fill_(is_matched, -torch.inf)
    logits.scatter_add_(1, last_tokens.clamp(min=0).long(), logit_changes)


def sample(logits: Tensor, settings: DrawSettings, positions: Tensor, all_greedy: bool, any_filter: bool) -> Tensor:
    """See the package's `sample`."""
    if all_greedy:
        return logits.max(-1).indices.to(torch.int32)
    first_keys, second_keys = noise.derive_row_keys(settings.seeds, positions)
    is_greedy = settings.temperature < MIN_TEMPERATURE
    temperature = settings.temperature.masked_fill(is_greedy, 1.0).unsqueeze(1)
    if any_filter:
        drawn = _draw_filtered(logits, temperature, settings, first_keys, second_keys)
    else:
        drawn = _draw(logits, temperature, first_keys.unsqueeze(1), second_keys.unsqueeze(1))
    if is_greedy.any():
        drawn = torch.where(is_greedy, logits.max(-1).indices, drawn)
    return drawn.to(torch.int32)


def _draw(logits: Tensor, temperature: Tensor, first_keys: Tensor, second_keys: Tensor) -> Tensor:
    """Draw one token per row: the token with the smallest e / p. temperature: [B, 1].

    e is the token's draw from Exp(1), p is its probability, and w is a weight proportional to p. The code takes the
    smallest w / -e, because `draw_negative_exponentials` returns -e.
    """
    vocab_size = logits.shape[1]
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    drawn_tokens = []
    rows_per_pass = max(1, DRAW_ELEMENTS // vocab_size)
    for begin in range(0, logits.shape[0], rows_per_pass):
        rows = slice(begin, begin + rows_per_pass)
        scaled = logits[rows].float() / temperature[rows]
        weights = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
        bits = noise.hash_tokens(token_ids, first_keys[rows], second_keys[rows])
        drawn_tokens.append(weights.div_(noise.draw_negative_exponentials(bits)).min(-1).indices)
    return drawn_tokens[0] if len(drawn_tokens) == 1 else torch.cat(drawn_tokens)


def _draw_filtered(
    logits: Tensor, temperature: Tensor, settings: DrawSettings, first_keys: Tensor, second_keys: Tensor
) -> Tensor:
    """Draw like `_draw` from the tokens that each row's filters keep. temperature: [B, 1], 1 for greedy rows."""
    drawn = []
    filters = zip(settings.top_k.tolist(), settings.top_p.tolist(), settings.min_p.tolist(), strict=True)
    for row, (row_top_k, row_top_p, row_min_p) in enumerate(filters):
        if row_top_k <= 0 and row_top_p >= 1 and row_min_p <= 0:
            keys = first_keys[row : row + 1, None], second_keys[row : row + 1, None]
            drawn.append(_draw(logits[row : row + 1], temperature[row : row + 1], *keys).squeeze(0))
            continue
        # As on CUDA, NaN counts as minus infinity. `topk` would put NaN first.
        scaled = (logits[row].float() / temperature[row]).nan_to_num(-torch.inf, neginf=-torch.inf)
        values, token_ids = filter_row(scaled, row_top_k, row_top_p, row_min_p)
        weights = (values - values[0]).exp_()
        bits = noise.hash_tokens(token_ids.to(torch.int32), first_keys[row], second_keys[row])
        drawn.append(token_ids[weights.div_(noise.draw_negative_exponentials(bits)).argmin()])
    return torch.stack(drawn)


def filter_row(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """Return the elements of `scaled` that the filters keep, in descending order, and their token ids.

    scaled: [V], the row's logits divided by the temperature.
    """
    vocab_size = scaled.shape[0]
    if top_k >= vocab_size:
        top_k = 0
    num_candidates = min(top_k + NUM_TIE_CANDIDATES if top_k > 0 else NUM_FIRST_CANDIDATES, vocab_size)
    while True:
        values, token_ids = scaled.topk(num_candidates)
        num_kept = _count_kept(scaled, values, top_k, top_p, min_p)
        if num_kept < num_candidates or num_candidates == vocab_size:
            return values[:num_kept], token_ids[:num_kept]
        num_candidates = min(num_candidates * CANDIDATE_GROWTH, vocab_size)


def _count_kept(scaled: Tensor, values: Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """Return how many of `values` the filters keep.

    values: the largest elements of `scaled`, in descending order. If all are kept, further elements may be kept too.
    """
    weights = (values - values[0]).exp_().double()
    num_kept = values.shape[0]
    if top_k > 0:
        num_kept = int((values >= values[top_k - 1]).sum())
    if top_p < 1:
        if num_kept < values.shape[0] or num_kept == scaled.shape[0]:
            total = weights[:num_kept].sum()
        elif top_k > 0:
            # The sum for top-p is unknown, because further elements of `scaled` may tie with the k-th value.
            return num_kept
        else:
            total = (scaled - values[0]).exp_().sum(dtype=torch.float64)
        last_index = int((weights[:num_kept].cumsum(0) < top_p * total).sum())
        # Due to rounding, even the sum of all weights may be below `top_p * total`.
        num_kept = int((values[:num_kept] >= values[min(last_index, num_kept - 1)]).sum())
    if min_p > 0:
        # Without a finite logit, all weights are NaN.
        num_kept = min(num_kept, max(int((weights >= min_p).sum()), 1))
    return num_kept


def compute_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the package's `compute_logprobs`."""
    normalizer = logits.float().logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens.long().unsqueeze(1)).float().sub_(normalizer).squeeze(1)
    top_values, top_ids = logits.topk(num_top, dim=-1)
    return chosen, top_ids.to(torch.int32), top_values.float().sub_(normalizer)


def compute_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """See the package's `compute_ranks`."""
    return (logits >= logits.gather(1, tokens.long().unsqueeze(1))).sum(1, dtype=torch.int32)
