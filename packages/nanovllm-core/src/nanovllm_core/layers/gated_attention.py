"""The projection of gated attention (Qiu et al. 2025, https://arxiv.org/abs/2505.06708)."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from nanovllm_core.layers.attention import qkv_parts
from nanovllm_core.layers.linear import ColumnParallelLinear, Part
from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.layers.weights import Slot
from nanovllm_core.model import BuildContext

GATE = "q_gate"


class GatedQKVLinear(ColumnParallelLinear):
    """Queries, keys, values and gates in one matmul: [T, hidden_size] -> [T, shares of all heads * head_dim].

    Checkpoints hold the gates in `q_proj`: per head the rows of the query, then those of the gate. Here the gates come
    last, so that queries, keys and values are contiguous. If quantised, `head_dim` must be a multiple of 128.
    Raises ValueError if the ranks can't share the heads evenly.
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
        parts = (*qkv_parts(num_heads, num_kv_heads, head_dim, bias=bias), Part(GATE, num_heads * head_dim, bias))
        super().__init__(hidden_size, parts, build, quantization=quantization)
        self._num_heads = num_heads

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The slots of queries, keys and values. The slots of queries also fill the gates."""
        prefix = name[: name.rfind(".") + 1]
        queries, gates = f"{prefix}q_proj.", f"{prefix}{GATE}."
        slots = dict(super().slots(name))
        for full, slot in slots.items():
            if full.startswith(queries):
                gate = slots[gates + full.removeprefix(queries)]
                shape = (2 * slot.shape[0], *slot.shape[1:])
                yield full, Slot(shape, partial(_copy_halves, self._num_heads, slot.copy, gate.copy), slot.dtype)
            elif not full.startswith(gates):
                yield full, slot


def _copy_halves(
    num_heads: int, copy_first: Callable[[Tensor], object], copy_second: Callable[[Tensor], object], whole: Tensor
) -> None:
    first, second = whole.unflatten(0, (num_heads, 2, -1)).unbind(1)
    copy_first(first.flatten(0, 1))
    copy_second(second.flatten(0, 1))
