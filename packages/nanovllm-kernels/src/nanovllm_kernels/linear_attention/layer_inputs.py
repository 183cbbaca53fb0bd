"""Defines the inputs of all implementations of Gated DeltaNet: weights, sizes, and the requests of a step."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Tokens per chunk of a prompt. States can be saved at positions that are multiples of this number.
CHECKPOINT_INTERVAL = 64
# Added to the squared length of a query or key, to avoid a division by 0.
L2_NORM_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """Holds a layer's weights except projections. The layer has Hk key heads of size Dk, and Hv value heads of size Dv.

    conv: float32 [W, C], W taps (oldest input first), C channels. Channels are grouped by key head: query, key, values.
    decay_rate: float32 [Hv], exp of A_log in the model's weight files.
    dt_bias: float32 [Hv], added to the decay's input a.
    norm: float32 [Dv], weight of the gated norm.
    eps: epsilon of the gated norm.
    """

    conv: Tensor
    decay_rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class LayerSizes(NamedTuple):
    """Holds a layer's sizes. k_dim and v_dim: sizes of a key head and of a value head.

    num_channels, num_taps: C and W of `DeltaWeights`.
    ring_rows, ring_width: shape of a slot of `conv_states`, a ring of rows. See `conv_state_shape`.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    num_channels: int
    num_taps: int
    ring_rows: int
    ring_width: int

    @property
    def group_size(self) -> int:
        """Number of value heads per key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts per request and step."""
        return (self.ring_rows - self.num_taps) // 2


def layer_sizes(weights: DeltaWeights, states: Tensor, conv_states: Tensor) -> LayerSizes:
    """Derive a layer's sizes from its weights and caches. `gated_delta_net` describes the caches."""
    _, num_v_heads, v_dim, k_dim = states.shape
    num_taps, num_channels = weights.conv.shape
    num_k_heads = (num_channels - num_v_heads * v_dim) // (2 * k_dim)
    return LayerSizes(num_k_heads, num_v_heads, k_dim, v_dim, num_channels, num_taps, *conv_states.shape[1:])


def conv_state_shape(num_taps: int, num_channels: int, num_v_heads: int, max_drafts: int) -> tuple[int, int]:
    """Return the shape of a slot of `conv_states`: (rows, width). Row p % rows holds the inputs at position p.

    Without drafts, the shape is (num_taps, num_channels). With drafts, a row also holds the token's `ba`, and there are
    num_taps + 2 max_drafts rows. With 16-bit inputs, a slot of a Qwen3-Next layer takes 64 KiB without drafts
    and 226 KiB with 5 drafts. The layer's float32 state takes 2 MiB per slot.
    """
    if not max_drafts:
        return num_taps, num_channels
    # A step that begins at position f uses the positions from f - pending - (num_taps - 1) to f + drafts. Both pending
    # (accepted drafts that the state lacks) and drafts are at most `max_drafts`. So each of these positions has its own
    # row: reads and writes may happen in any order, and rejected drafts overwrite no input that a later step reads.
    return num_taps + 2 * max_drafts, num_channels + 2 * num_v_heads


class Prefill(NamedTuple):
    """Holds a request with several tokens in the step, for the plain torch path.

    first_row, end_row: range of the request's tokens in the step.
    first_position: position of the token at `first_row`.
    checkpoints: pairs (position, slot) of states to save within this step.
    """

    first_row: int
    end_row: int
    slot: int
    first_position: int
    checkpoints: tuple[tuple[int, int], ...]


class TokensAtOffset(NamedTuple):
    """Holds at most one token per decode: the token at `offset` from the decode's first token of the step.

    offset: 0 for the decode's first token of the step; negative for pending tokens, which earlier steps received.
    decodes: int64 [m], index of each token's decode.
    rows: int64 [m], index of each token in the step; meaningless for pending tokens.
    """

    offset: int
    decodes: Tensor
    rows: Tensor


class DraftPlan(NamedTuple):
    """Holds a step's n decodes, for caches with drafts (plain torch path). The step's first t tokens belong to decodes.

    token_decodes: int64 [t], index of each token's decode.
    token_offsets: int64 [t], index of each token among its decode's tokens of this step.
    num_pending: int64 [n], number of pending tokens of each decode.
    rounds: pending tokens and the step's tokens, by offset, lowest offset first. States change in this order.
    """

    token_decodes: Tensor
    token_offsets: Tensor
    num_pending: Tensor
    rounds: tuple[TokensAtOffset, ...]

    @property
    def max_query_len(self) -> int:
        """Maximum number of tokens of a decode in the step."""
        return self.rounds[-1].offset + 1


class TorchPlan(NamedTuple):
    """Holds a step's requests for the plain torch path: n decodes, then `prefills`.

    A decode has one token, or one token and drafts.

    slots: int64 [n], state slot of each decode.
    positions: int64 [n], position of each decode's first token.
    checkpoint_decodes: int64 [m], indices of the decodes whose state is also saved to a checkpoint.
    checkpoint_slots: int64 [m], slots that receive the saved states.
    drafts: None for caches without drafts.
    """

    slots: Tensor
    positions: Tensor
    checkpoint_decodes: Tensor
    checkpoint_slots: Tensor
    prefills: tuple[Prefill, ...]
    drafts: DraftPlan | None


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Holds a step's requests for recurrent layers, from the package's `plan_states`. torch_plan: None for "triton"."""

    slots: Tensor
    checkpoints: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    num_decodes: int | None
    max_query_len: int
    num_tokens: int
    num_pending: Tensor | None
    has_drafts: bool
    torch_plan: TorchPlan | None


def check_drafts(sizes: LayerSizes, batch: StateBatch) -> None:
    """Raise ValueError if a layer's caches do not fit the step's drafts."""
    has_draft_rows = sizes.ring_rows > sizes.num_taps
    if has_draft_rows != (batch.num_pending is not None):
        raise ValueError(
            f"num_pending is {'set' if batch.num_pending is not None else 'None'}, but conv_states has "
            f"{sizes.ring_rows} rows for {sizes.num_taps} taps: pass num_pending only with caches for drafts"
        )
    if batch.has_drafts and batch.max_query_len > 1 + sizes.max_drafts:
        raise ValueError(
            f"the step has up to {batch.max_query_len} tokens of a request, but the caches are for at most "
            f"{sizes.max_drafts} drafts per request: propose fewer drafts, or allocate larger caches"
        )
