"""Named tuples of the tensors that the operators on request tables read and write."""

from typing import NamedTuple

from torch import Tensor


class TokenTables(NamedTuple):
    """Tables of R requests.

    tokens: int32 [R, max_len], each request's prompt and generated tokens.
    num_computed: int32 [R], number of each request's tokens whose keys and values are in the cache.
    """

    tokens: Tensor
    num_computed: Tensor


class BatchInputs(NamedTuple):
    """Inputs of a step with T tokens of B requests. The tokens of a request are adjacent.

    input_ids: int32 [T]. positions: int64 [T].
    seq_lens: int32 [B], each request's number of tokens up to the end of the step, 0 for a request without tokens in
        this step.
    slot_mapping: int64 [T], each token's cache slot, page * page_size + offset.
    last_token_indices: int64 [B], index of each request's last token in the step. A request without tokens has the
        index of the last token of earlier requests, or 0 if there is no such token.
    block_tables: int32 [B, num_page_columns], page numbers of each request. See `build_inputs`.
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    last_token_indices: Tensor
    block_tables: Tensor
