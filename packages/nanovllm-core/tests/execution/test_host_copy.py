import pytest
import torch

from nanovllm_core.execution import host_copy
from nanovllm_core.execution.host_copy import HostCopyRing, HostCopySlot


@pytest.fixture
def unpinned_slots(monkeypatch):
    """Slots in unpinned memory, for machines without CUDA."""

    def make_unpinned_slot(size: int, stream: torch.cuda.Stream) -> HostCopySlot:
        tokens = torch.zeros(size, dtype=torch.int32)
        return HostCopySlot(tokens, tokens.numpy(), torch.cuda.Event(), torch.cuda.Event(), stream)

    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(host_copy, "_make_slot", make_unpinned_slot)


@pytest.mark.usefixtures("unpinned_slots")
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_slots_of_steps_in_flight_are_not_overwritten(max_steps_in_flight):
    ring = HostCopyRing(3, max_steps_in_flight, torch.cuda.Stream())
    slots = [ring.next_slot() for _ in range(20)]
    for index, slot in enumerate(slots):
        slot.token_array[:] = index
        in_flight = slots[max(0, index - max_steps_in_flight) : index]
        assert [int(other.token_array[0]) for other in in_flight] == list(
            range(max(0, index - max_steps_in_flight), index)
        )
    assert slots[max_steps_in_flight + 2].tokens is slots[0].tokens
