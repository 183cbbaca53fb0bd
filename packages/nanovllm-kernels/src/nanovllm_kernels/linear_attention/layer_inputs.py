"""What every implementation of Gated DeltaNet takes: a layer's weights and sizes, and the requests of a step."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Tokens per chunk. Chunks end at multiples of this position, and states can be saved only there.
CHECKPOINT_INTERVAL = 64
# Added to the squared length of queries and keys before they are normed.
L2_NORM_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """A layer's weights besides its projections, for Hk key heads of Dk, each with Hv / Hk value heads of Dv.

    conv: float32 [W, C], the oldest tap first; channels are, per key head, its query, its key, and its value heads.
    decay: float32 [Hv], exp of the checkpoint's A_log.
    dt_bias: float32 [Hv].
    norm: float32 [Dv], weight of the gated norm.
    eps: epsilon of the gated norm.
    """

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class LayerSizes(NamedTuple):
    """A layer's numbers of heads, their dimensions, and the convolution's numbers of channels and taps."""

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


def layer_sizes(recurrent: Tensor, conv: Tensor) -> LayerSizes:
    """Derive the sizes from the shapes of the states, which `gated_delta_net` describes."""
    _, num_v_heads, v_dim, k_dim = recurrent.shape
    _, num_taps, num_channels = conv.shape
    num_k_heads = (num_channels - num_v_heads * v_dim) // (2 * k_dim)
    return LayerSizes(num_k_heads, num_v_heads, k_dim, v_dim, num_channels, num_taps)


class Prefill(NamedTuple):
    """A request with several tokens, for the plain torch path.

    first_row, end_row: the request's rows in the step; `end_row` is the first row after them.
    slot: the request's state slot.
    first_position: position of the request's first token of this step.
    saves: pairs (position, slot) of states to save within this step.
    """

    first_row: int
    end_row: int
    slot: int
    first_position: int
    saves: tuple[tuple[int, int], ...]


class TorchPlan(NamedTuple):
    """A step's requests for the plain torch path: n decodes with one token each, then `prefills`.

    slots, positions: int64 [n], of the decodes.
    save_rows: int64 [m], the decodes whose state is also saved.
    save_slots: int64 [m], the slots to which these states are saved.
    """

    slots: Tensor
    positions: Tensor
    save_rows: Tensor
    save_slots: Tensor
    prefills: tuple[Prefill, ...]


@dataclass(frozen=True, slots=True)
class StateBatch:
    """A step's requests as recurrent layers see them, the same for every layer. Made by `plan_states`.

    torch_plan: plan of the plain torch path, None for "triton". `plan_states` describes the other fields.
    """

    slots: Tensor
    saves: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    num_decodes: int | None
    max_query_len: int
    num_tokens: int
    torch_plan: TorchPlan | None
