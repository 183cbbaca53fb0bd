"""The device's state slots: one tensor for all recurrent layers of a kind, of which each has its part.

This room must not know what a state means, nor whose a slot is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_core.model import StateCache, StateSpec


class _Group(NamedTuple):
    """Layers that want the same: recurrent [layers, slots, ...], conv [layers, slots, ...]."""

    recurrent: Tensor
    conv: Tensor


class StateMemory:
    """Slots 0..num_slots, the first of which is the null slot. caches: one a spec, in their order."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        *,
        state_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._groups: dict[StateSpec, _Group] = {}
        for spec in dict.fromkeys(specs):
            outer = (specs.count(spec), num_slots + 1)
            self._groups[spec] = _Group(
                torch.zeros((*outer, *spec.recurrent), dtype=state_dtype, device=device),
                torch.zeros((*outer, *spec.conv), dtype=dtype, device=device),
            )
        taken = dict.fromkeys(specs, 0)
        caches: list[StateCache] = []
        for spec in specs:
            group, index = self._groups[spec], taken[spec]
            caches.append(StateCache(group.recurrent[index], group.conv[index]))
            taken[spec] += 1
        self.caches = tuple(caches)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Let the slots `targets` hold what `sources` hold; int64, each [n]. All are read before any is written."""
        for group in self._groups.values():
            for states in group:
                states.index_copy_(1, targets, states.index_select(1, sources))
