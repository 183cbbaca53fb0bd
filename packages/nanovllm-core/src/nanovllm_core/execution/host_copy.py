"""Pinned host buffers to which the device copies the tokens of a step, with the events that time the step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostCopySlot:
    """The buffer and the events of one step.

    tokens: pinned int32 [size].
    token_array: the same memory as a numpy array.
    begin_event, end_event: timing events, recorded when the step begins and ends.
    stream: the stream of all steps, stored because asking torch for the current stream is slow.
    """

    tokens: Tensor
    token_array: NDArray[np.int32]
    begin_event: torch.cuda.Event
    end_event: torch.cuda.Event
    stream: torch.cuda.Stream

    def copy(self, tensors: Sequence[Tensor | None]) -> list[NDArray[np.int32] | None]:
        """Start to copy int32 tensors to consecutive parts of the buffer. Returns views of these parts."""
        arrays, start = list[NDArray[np.int32] | None](), 0
        for tensor in tensors:
            if tensor is None:
                arrays.append(None)
                continue
            end = start + tensor.numel()
            self.tokens[start:end].copy_(tensor.view(-1), non_blocking=True)
            arrays.append(self.token_array[start:end].reshape(tensor.shape))
            start = end
        return arrays


class HostCopyRing:
    """Slots that steps use in turn, because creating a buffer and events takes longer than a copy.

    slot_size: maximum number of integers that a step copies.
    max_steps_in_flight: maximum number of steps that are launched but not finished.
    """

    def __init__(self, slot_size: int, max_steps_in_flight: int, stream: torch.cuda.Stream):
        self._slots = [_make_slot(slot_size, stream) for _ in range(max_steps_in_flight + 2)]
        self._index = 0

    def next_slot(self) -> HostCopySlot:
        """The slot for the next step. The slot is used again `max_steps_in_flight` + 2 steps later."""
        self._index = (self._index + 1) % len(self._slots)
        return self._slots[self._index]


def _make_slot(size: int, stream: torch.cuda.Stream) -> HostCopySlot:
    tokens = torch.empty(size, dtype=torch.int32, pin_memory=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    return HostCopySlot(tokens, tokens.numpy(), begin, end, stream)
