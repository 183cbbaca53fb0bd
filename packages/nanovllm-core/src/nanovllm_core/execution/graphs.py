"""How a step reaches the device: launched kernel by kernel, or replayed from a captured graph.

Every step is launched eagerly so far; the runner asks here, and counts, so that a graph can answer for the shapes it
was captured for. This room must not know what is inside a step.
"""

from collections import Counter
from enum import StrEnum

from nanovllm_core.scheduling.plan import BatchShape


class GraphMode(StrEnum):
    """What is replayed from a graph in a step."""

    NONE = "none"


class GraphDispatcher:
    """Picks the mode of each step by its shape, and counts the picks by mode and class of batch."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[GraphMode, str]] = Counter()

    def dispatch(self, shape: BatchShape) -> GraphMode:
        """The mode for a step of this shape."""
        mode = GraphMode.NONE
        self.counts[mode, "decode" if shape.query_len == 1 else "mixed"] += 1
        return mode
