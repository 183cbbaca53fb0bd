"""Build contexts of one rank, and of fake ranks that only split weights."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import ParallelContext


@dataclass(frozen=True)
class FakeRank:
    """A rank whose collectives do nothing, so that a test can add up or join the ranks' results itself."""

    rank: int
    size: int

    def split_evenly(self, total: int, quantity: str) -> int:
        if total % self.size:
            raise ValueError(f"{quantity} is {total}")
        return total // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture
def build() -> BuildContext:
    return BuildContext(torch.device("cpu"), torch.float32, ParallelContext())


@pytest.fixture
def ranks() -> Callable[[int], list[BuildContext]]:
    return lambda size: [BuildContext(torch.device("cpu"), torch.float32, FakeRank(rank, size)) for rank in range(size)]
