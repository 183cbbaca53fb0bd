"""Implements the input projection of gated attention (Qiu et al. 2025, https://arxiv.org/abs/2505.06708)."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from nanovllm_core.layers.attention import qkv_parts, query_part
from nanovllm_core.layers.linear import ColumnParallelLinear
from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.layers.weights import WeightSlot
from nanovllm_core.model import BuildContext

# Name of the part of `GatedQKVLinear` that computes the gates. Checkpoints store its rows inside `q_proj`.
GATE_PART_NAME = "q_gate"


class GatedQKVLinear(ColumnParallelLinear):
    """Projects [T, hidden_size] to this rank's queries, keys, values and gates, in this order, in one matmul.

    For each head, the checkpoint's `q_proj` holds the rows of the query, then the rows of the gate.
    Raises ValueError if the ranks can't share the heads (see `LinearPart.own_rows`).

    quantization: format of the weight; requires a `head_dim` that is a multiple of 128. None for the model's dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        build: BuildContext,
        *,
        bias: bool = False,
        quantization: BlockFP8 | None = None,
    ):
        parts = (
            *qkv_parts(num_heads, num_kv_heads, head_dim, bias=bias),
            query_part(GATE_PART_NAME, num_heads, num_kv_heads, head_dim, bias=bias),
        )
        super().__init__(hidden_size, parts, build, quantization=quantization)
        self._num_heads = num_heads

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load `q_proj`, `k_proj` and `v_proj`. The slots of `q_proj` also fill the gates."""
        prefix = layer_name[: layer_name.rfind(".") + 1]
        query_prefix, gate_prefix = f"{prefix}q_proj.", f"{prefix}{GATE_PART_NAME}."
        slot_by_name = dict(super().weight_slots(layer_name))
        for tensor_name, slot in slot_by_name.items():
            if tensor_name.startswith(query_prefix):
                gate_slot = slot_by_name[gate_prefix + tensor_name.removeprefix(query_prefix)]
                shape = (2 * slot.shape[0], *slot.shape[1:])
                copy = partial(_copy_queries_and_gates, self._num_heads, slot.copy, gate_slot.copy)
                yield tensor_name, WeightSlot(shape, copy, slot.dtype)
            elif not tensor_name.startswith(gate_prefix):
                yield tensor_name, slot


def _copy_queries_and_gates(
    num_heads: int, copy_queries: Callable[[Tensor], object], copy_gates: Callable[[Tensor], object], tensor: Tensor
) -> None:
    queries, gates = tensor.unflatten(0, (num_heads, 2, -1)).unbind(1)
    copy_queries(queries.flatten(0, 1))
    copy_gates(gates.flatten(0, 1))
