"""Proposes and verifies drafts on a CPU: the reference for the kernels' tests, and the CPU path."""

import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.request_tables.tables import TokenTables


def verify_drafts(
    table_rows: Tensor, query_start_loc: Tensor, sampled: Tensor, tables: TokenTables, token_counts: Tensor | None
) -> Tensor:
    """See the package's `verify_drafts`. The tensors are on a CPU."""
    num_new_tokens = torch.zeros_like(table_rows)
    starts, choices, tokens = query_start_loc.numpy(), sampled.numpy(), tables.tokens.numpy()
    query_lens = np.diff(starts)
    requests = query_lens.nonzero()[0]
    if requests.shape[0] == 0:
        return num_new_tokens
    rows, query_lens = table_rows.numpy()[requests, None], query_lens[requests, None]
    num_computed = tables.num_computed.numpy()
    positions = num_computed[rows] + 1
    # `choices` and `is_accepted` have a row per request. Columns beyond the request's number of tokens are not used.
    offsets = np.arange(query_lens.max())
    choices = choices[np.minimum(starts[requests, None] + offsets, choices.shape[0] - 1)]
    is_accepted = choices == tokens[rows, np.minimum(positions + offsets, tokens.shape[1] - 1)]
    is_accepted &= offsets < query_lens - 1
    num_accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(1, dtype=np.int32, keepdims=True)
    num_computed[rows] += num_accepted + 1
    num_new_tokens.numpy()[requests] = num_accepted[:, 0] + 1
    positions += num_accepted
    is_written = positions < tokens.shape[1]
    tokens[rows[is_written], positions[is_written]] = np.take_along_axis(choices, num_accepted, 1)[is_written]
    if token_counts is not None:
        is_new = offsets <= num_accepted
        np.add.at(token_counts.numpy(), (np.broadcast_to(rows, is_new.shape)[is_new], choices[is_new]), 1)
    return num_new_tokens


def propose_ngrams(
    table_rows: Tensor, is_sampled: Tensor, tables: TokenTables, num_drafts: int, min_match: int, max_match: int
) -> tuple[Tensor, Tensor]:
    """See the package's `propose_ngrams`. The tensors are on a CPU."""
    drafts = tables.tokens.new_zeros((table_rows.shape[0], num_drafts))
    num_proposed = drafts.new_zeros(table_rows.shape)
    tokens, draft_rows, counts = tables.tokens.numpy(), drafts.numpy(), num_proposed.numpy()
    num_computed = tables.num_computed.numpy()
    offsets = np.arange(num_drafts)
    requests = enumerate(zip(table_rows.tolist(), is_sampled.tolist(), strict=True))
    for request, row in ((request, row) for request, (row, has_sample) in requests if has_sample):
        last = int(num_computed[row])
        draft_places = tokens[row, last + 1 : last + 1 + num_drafts]
        num_places = draft_places.shape[0]
        # Skip a full row. It has no place for drafts, and may lack even the last sampled token, which the search needs.
        if num_places == 0:
            continue
        end = _find_last_occurrence(tokens[row, : last + 1], min_match, max_match)
        if end is not None:
            draft_places[:] = tokens[row, end + 1 + offsets[:num_places] % (last - end)]
            counts[request] = num_places
        draft_rows[request, :num_places] = draft_places
    return drafts, num_proposed


def _find_last_occurrence(known: np.ndarray, min_match: int, max_match: int) -> int | None:
    """Find the longest suffix of `known` that also occurs earlier. The suffix has `min_match` to `max_match` tokens.

    Returns the position at which the suffix's last earlier occurrence ends; None if no suffix occurs earlier.
    """
    last = known.shape[0] - 1
    longest_matches, longest_length = None, 0
    # Element i: whether the `length` tokens that begin at position i equal the last `length` tokens.
    is_equal = known[:last] == known[last]
    for length in range(1, min(max_match, last) + 1):
        if length > 1:
            begin = last + 1 - length
            is_equal = np.logical_and(is_equal[1:], known[:begin] == known[begin])
        if length >= min_match:
            if not is_equal.any():
                break
            longest_matches, longest_length = is_equal, length
    if longest_matches is None:
        return None
    begin = longest_matches.shape[0] - 1 - int(longest_matches[::-1].argmax())
    return begin + longest_length - 1
