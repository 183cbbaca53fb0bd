"""Pinned host buffers to which the device copies the tokens of a step, with the events that time the step."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostCopySlot:
    """The buffer and the events of one step.

    tokens: pinned int32 [size], see `ChosenTokens.packed`.
    token_array: the same memory as a numpy array.
    begin_event, end_event: timing events, recorded when the step begins and ends.
    stream: the stream of all steps, stored because asking torch for the current stream is slow.
    """

    tokens: Tensor
    token_array: NDArray[np.int32]
    begin_event: torch.cuda.Event
    end_event: torch.cuda.Event
    stream: torch.cuda.Stream
    _view_by_length: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def first_tokens(self, count: int) -> Tensor:
        """A view of the first `count` tokens, cached for later steps."""
        if (view := self._view_by_length.get(count)) is None:
            view = self._view_by_length[count] = self.tokens[:count]
        return view


class HostCopyRing:
    """Slots that steps use in turn, because creating a buffer and events takes longer than a copy.

    size: maximum length of `ChosenTokens.packed`.
    max_steps_in_flight: maximum number of steps that are launched but not finished.
    """

    def __init__(self, size: int, max_steps_in_flight: int, stream: torch.cuda.Stream):
        self._slots = [_make_slot(size, stream) for _ in range(max_steps_in_flight + 2)]
        self._index = 0

    def next_slot(self) -> HostCopySlot:
        """The slot for the next step, which is used again `max_steps_in_flight` + 2 steps later."""
        self._index = (self._index + 1) % len(self._slots)
        return self._slots[self._index]


def _make_slot(size: int, stream: torch.cuda.Stream) -> HostCopySlot:
    tokens = torch.empty(size, dtype=torch.int32, pin_memory=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    return HostCopySlot(tokens, tokens.numpy(), begin, end, stream)
