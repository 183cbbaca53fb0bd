"""The device's state slots: one tensor for all recurrent layers of the same shape, and copies between slots."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_core.cache.state_pool import NULL_SLOT
from nanovllm_core.execution.memory import zeros
from nanovllm_core.model import StateCache, StateSpec
from nanovllm_kernels.linear_attention import copy_states


class _Group(NamedTuple):
    """States of the layers that share a spec: recurrent [layers, slots, ...], conv [layers, slots, ...]."""

    recurrent: Tensor
    conv: Tensor


class StateMemory:
    """Slots 0..num_slots; slot 0 is the null slot. caches: one entry per spec, in the order of `specs`."""

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
                zeros((*outer, *spec.recurrent), state_dtype, device),
                zeros((*outer, *spec.conv), dtype, device),
            )
        taken = dict.fromkeys(specs, 0)
        caches: list[StateCache] = []
        for spec in specs:
            group, index = self._groups[spec], taken[spec]
            caches.append(StateCache(group.recurrent[index], group.conv[index]))
            taken[spec] += 1
        self.caches = tuple(caches)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states between slots, one after another.

        sources, targets: int64 [n], in an order that `sequential_copies` returns.
        """
        for group in self._groups.values():
            for states in group:
                copy_states(states, sources, targets)


def sequential_copies(copies: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order copies of slots so that each slot is read before a copy overwrites it.

    copies: pairs (source, target) that are meant to happen at once. A target occurs once, the null slot never.
    Returns the pairs in an order that gives the same states one after another. Cycles take one more pair each: the null
    slot, whose content means nothing, keeps a state meanwhile.
    """
    sources = {target: source for source, target in copies}
    if sources.keys().isdisjoint(sources.values()):
        return list(copies)
    num_readers = Counter(sources.values())
    writable = [target for target in sources if not num_readers[target]]
    ordered: list[tuple[int, int]] = []
    while sources:
        if not writable:
            # Only cycles are left, in which each slot has one reader.
            parked, reader = next((source, target) for target, source in sources.items())
            ordered.append((parked, NULL_SLOT))
            sources[reader] = NULL_SLOT
            writable.append(parked)
        target = writable.pop()
        source = sources.pop(target)
        ordered.append((source, target))
        num_readers[source] -= 1
        if source in sources and not num_readers[source]:
            writable.append(source)
    return ordered
