"""Copies between state slots: one after another they give what all at once would give."""

import random

import numpy as np
import pytest
import torch

from nanovllm_core.cache.state_pool import NULL_SLOT
from nanovllm_core.execution.request_table import RequestTable
from nanovllm_core.execution.state_memory import StateMemory, sequential_copies
from nanovllm_core.model import StateSpec
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, NewRow, NewState, ScheduledRows, StepPlan
from nanovllm_core.token_ids import as_token_ids

SPECS = [StateSpec((2, 3, 5), (4, 6)), StateSpec((1, 2, 2), (2, 4)), StateSpec((2, 3, 5), (4, 6))]


def filled_memory(num_slots: int, state_dtype: torch.dtype) -> StateMemory:
    memory = StateMemory(SPECS, num_slots, state_dtype=state_dtype, dtype=torch.bfloat16, device=torch.device("cpu"))
    for cache in memory.caches:
        for states in cache:
            states.copy_(torch.randn(states.shape))
    return memory


def column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_random_copies_are_those_of_index_select(state_dtype):
    rng = random.Random(0)
    chains = cycles = 0
    for _ in range(200):
        num_slots = rng.randrange(1, 12)
        targets = rng.sample(range(1, num_slots + 1), rng.randrange(1, num_slots + 1))
        copies = [(rng.randrange(1, num_slots + 1), target) for target in targets]
        ordered = sequential_copies(copies)
        memory = filled_memory(num_slots, state_dtype)
        expected = [states.clone() for cache in memory.caches for states in cache]
        for states in expected:
            sources, targets = map(column, map(list, zip(*copies, strict=True)))
            states.index_copy_(0, targets, states.index_select(0, sources))
        memory.copy(*map(column, map(list, zip(*ordered, strict=True))))
        found = [states for cache in memory.caches for states in cache]
        assert all(torch.equal(states[1:], same[1:]) for states, same in zip(found, expected, strict=True))
        chains += ordered != copies
        cycles += len(ordered) > len(copies)
        assert (len(ordered) == len(copies)) == all(target != NULL_SLOT for _, target in ordered)
    assert chains > 20
    assert cycles > 20


def test_copies_that_do_not_overlap_stay_as_they_are():
    copies = [(1, 5), (1, 4), (2, 3)]
    assert sequential_copies(copies) == copies
    assert sequential_copies([]) == []


def test_a_chain_of_any_length_takes_as_many_copies():
    chain = [(index + 1, index) for index in range(1, 300)]
    random.Random(0).shuffle(chain)
    assert sequential_copies(chain) == sorted(chain, key=lambda copy: copy[1])


def test_a_slot_evicted_for_a_later_request_is_read_first():
    table = RequestTable(4, 64, 16, 50, 1, torch.device("cpu"), has_states=True)
    new_rows = [
        NewRow(row, as_token_ids([1]), 1, 0, SamplingParams(), seed=0, stop_ids=(), state=NewState(slot, origin, ()))
        for row, (slot, origin) in enumerate([(3, 6), (5, 3), (7, 0)])
    ]
    scheduled = ScheduledRows(np.arange(3), np.ones(3, np.int64), np.ones(3, np.bool_))
    plan = StepPlan(0, new_rows, NewBlocks(), scheduled, BatchShape(3, 3, 1), max_seq_len=1)
    restored = table.apply(plan).restored
    assert restored is not None
    assert [slots.tolist() for slots in restored] == [[3, 6], [5, 3]]
