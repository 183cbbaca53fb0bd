from collections.abc import Callable

import pytest
import torch

from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import ParallelContext


@pytest.fixture
def build() -> BuildContext:
    return BuildContext(torch.device("cpu"), torch.float32, ParallelContext())


@pytest.fixture
def ranks() -> Callable[[int], list[BuildContext]]:
    """The ranks have no communicator. Tests combine the results of the ranks."""

    def make_builds(size: int) -> list[BuildContext]:
        contexts = [ParallelContext(rank, size) for rank in range(size)]
        return [BuildContext(torch.device("cpu"), torch.float32, context) for context in contexts]

    return make_builds
