"""Where steps' tokens land: no place is taken again while somebody may still read it."""

import pytest
import torch

from nanovllm_core.execution import landing
from nanovllm_core.execution.landing import Landing, Place


@pytest.fixture
def unpinned(monkeypatch):
    """Places as they are, but of memory that a CPU has."""

    def make(size: int, stream: torch.cuda.Stream) -> Place:
        tokens = torch.zeros(size, dtype=torch.int32)
        return Place(tokens, tokens.numpy(), torch.cuda.Event(), torch.cuda.Event(), stream)

    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(landing, "_make_place", make)


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_place_outlives_the_steps_in_flight_and_one_that_is_read(depth):
    places = Landing(3, depth, torch.cuda.Stream())
    taken = [places.take() for _ in range(20)]
    for at, place in enumerate(taken):
        place.numbers[:] = at
        still_read = taken[max(0, at - depth) : at]
        assert [int(other.numbers[0]) for other in still_read] == list(range(max(0, at - depth), at))
    assert taken[depth + 2].tokens is taken[0].tokens
