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
    decay_rate: float32 [Hv], exp of the checkpoint's A_log.
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
    """Holds a layer's sizes. k_dim and v_dim: sizes of a key head and of a value head. The other fields are counts."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    num_channels: int
    num_taps: int

    @property
    def group_size(self) -> int:
        """Number of value heads per key head."""
        return self.num_v_heads // self.num_k_heads


def layer_sizes(states: Tensor, conv_states: Tensor) -> LayerSizes:
    """Derive a layer's sizes from its states [num_state_slots, Hv, Dv, Dk] and conv_states [num_state_slots, W, C]."""
    _, num_v_heads, v_dim, k_dim = states.shape
    _, num_taps, num_channels = conv_states.shape
    num_k_heads = (num_channels - num_v_heads * v_dim) // (2 * k_dim)
    return LayerSizes(num_k_heads, num_v_heads, k_dim, v_dim, num_channels, num_taps)


class Prefill(NamedTuple):
    """Holds a request with several tokens in the step, for the plain torch path.

    first_row: index of the request's first token in the step.
    end_row: index after the request's last token in the step.
    slot: the request's state slot.
    first_position: position of the token at `first_row`.
    checkpoints: pairs (position, slot) of states to save within this step.
    """

    first_row: int
    end_row: int
    slot: int
    first_position: int
    checkpoints: tuple[tuple[int, int], ...]


class TorchPlan(NamedTuple):
    """Holds a step's requests for the plain torch path: n decodes with one token each, then `prefills`.

    slots: int64 [n], state slot of each decode.
    positions: int64 [n], position of each decode's token.
    checkpoint_rows: int64 [m], indices of the decodes whose state is also saved to a checkpoint.
    checkpoint_slots: int64 [m], slots that receive the saved states.
    """

    slots: Tensor
    positions: Tensor
    checkpoint_rows: Tensor
    checkpoint_slots: Tensor
    prefills: tuple[Prefill, ...]


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Holds a step's requests for recurrent layers. The package's `plan_states` describes the fields.

    torch_plan: plan of the plain torch path. None for the backend "triton".
    """

    slots: Tensor
    checkpoints: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    num_decodes: int | None
    max_query_len: int
    num_tokens: int
    torch_plan: TorchPlan | None
