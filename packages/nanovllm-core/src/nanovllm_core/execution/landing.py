"""Where the tokens of steps land on the host: pinned memory and events, used in turn, as making them anew would cost a
step more than the copy.

This room must not know what the tokens are for.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """One step's: pinned int32 [size], the same as numbers, and timing events for the step's begin and end, which are
    to be recorded on `stream`: to ask for the current one takes longer than to record.
    """

    tokens: Tensor
    numbers: NDArray[np.int32]
    begin: torch.cuda.Event
    end: torch.cuda.Event
    stream: torch.cuda.Stream
    _first: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def first(self, count: int) -> Tensor:
        """The first `count` of `tokens`, made once: there are only so many."""
        if (part := self._first.get(count)) is None:
            part = self._first[count] = self.tokens[:count]
        return part


class Landing:
    """Places for steps of up to `size` tokens each, of which up to `depth` are in flight, in the order they began.

    A step's place is another's again when `depth` + 2 have begun after it. stream: what steps run on.
    """

    def __init__(self, size: int, depth: int, stream: torch.cuda.Stream):
        self._places = [_make_place(size, stream) for _ in range(depth + 2)]
        self._at = 0

    def take(self) -> Place:
        """The place of the step that begins."""
        self._at = (self._at + 1) % len(self._places)
        return self._places[self._at]


def _make_place(size: int, stream: torch.cuda.Stream) -> Place:
    tokens = torch.empty(size, dtype=torch.int32, pin_memory=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    return Place(tokens, tokens.numpy(), begin, end, stream)
