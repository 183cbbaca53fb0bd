from dataclasses import replace

import numpy as np
import torch
from counting import count_calls

from nanovllm_core.execution.request_table import RequestTable, SamplingOps
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, NewRow, NewState, ScheduledRows, StepPlan
from nanovllm_core.token_ids import as_token_ids


def make_plan(rows: list[int], lengths: list[int], samples: list[bool], new_rows=(), new_blocks=None) -> StepPlan:
    scheduled = ScheduledRows(np.array(rows), np.array(lengths), np.array(samples))
    shape = BatchShape(len(rows), sum(lengths), None)
    return StepPlan(0, list(new_rows), new_blocks or NewBlocks(), scheduled, shape, max_seq_len=64)


def make_table(num_rows: int) -> RequestTable:
    return RequestTable(num_rows, 64, 16, 50, 1, torch.device("cpu"))


def test_applied_plan_changes_the_tables_and_gives_the_inputs_of_the_step():
    table = make_table(4)
    blocks = NewBlocks()
    blocks.add(2, 0, [9, 8, 7])
    blocks.add(0, 1, [5])
    new = NewRow(2, as_token_ids([3, 4, 5]), 3, 0, SamplingParams(temperature=0.5, logprobs=4), seed=1, stop_ids=())
    step = table.apply_plan(make_plan([0, 2, 3], [1, 3, 2], [True, True, False], [new], blocks))
    assert table.block_table.tolist() == [[0, 5, 0, 0], [0] * 4, [9, 8, 7, 0], [0] * 4]
    assert table.tokens[2, :3].tolist() == [3, 4, 5]
    assert step.device_rows.table_rows.tolist() == [0, 2, 3]
    assert step.device_rows.query_start_loc.tolist() == [0, 1, 4, 6]
    assert step.device_rows.is_sampled.tolist() == [1, 1, 0]
    assert step.sampling_indices.tolist() == [0, 1]
    assert step.sampling_ops == SamplingOps.RANDOM
    assert step.num_logprobs.tolist() == [-1, 4]
    assert step.max_num_logprobs == 4


def test_new_blocks_of_running_requests_are_written():
    table = make_table(3)
    blocks = NewBlocks([2, 0], [3, 1], [6, 4])
    table.apply_plan(make_plan([0, 2], [1, 1], [True, True], new_blocks=blocks))
    assert table.block_table.tolist() == [[0, 4, 0, 0], [0] * 4, [0, 0, 0, 6]]


def test_number_of_calls_does_not_depend_on_the_number_of_requests():
    counts = []
    for count in (8, 256):
        table = make_table(count)
        first, second = (make_plan(list(range(count)), [1] * count, [True] * count) for _ in range(2))
        table.apply_plan(first)
        counts.append(count_calls(table.apply_plan, second))
    few, many = counts
    assert few == many
    assert sum(many.values()) < 200


def test_same_scheduled_rows_reuse_the_inputs_unless_a_row_is_new():
    table = make_table(4)
    first = make_plan([0, 2], [1, 1], [True, True])
    inputs = table.apply_plan(first)
    grown = replace(first, new_blocks=NewBlocks([2], [3], [6]))
    assert table.apply_plan(grown) is inputs
    assert table.block_table[2].tolist() == [0, 0, 0, 6]
    new = NewRow(2, as_token_ids([3, 4]), 2, 1, SamplingParams(temperature=0.5), seed=1, stop_ids=())
    assert table.apply_plan(replace(first, new_rows=[new])).sampling_ops == SamplingOps.RANDOM
    assert table.apply_plan(make_plan([0], [1], [True])).device_rows.table_rows.tolist() == [0]


def test_state_slot_is_read_before_another_row_overwrites_it():
    table = RequestTable(4, 64, 16, 50, 1, torch.device("cpu"), has_recurrent_layers=True)
    new_rows = [
        NewRow(row, as_token_ids([1]), 1, 0, SamplingParams(), seed=0, stop_ids=(), state=NewState(slot, origin, ()))
        for row, (slot, origin) in enumerate([(3, 6), (5, 3), (7, 0)])
    ]
    scheduled = ScheduledRows(np.arange(3), np.ones(3, np.int64), np.ones(3, np.bool_))
    plan = StepPlan(0, new_rows, NewBlocks(), scheduled, BatchShape(3, 3, 1), max_seq_len=1)
    state_copies = table.apply_plan(plan).state_copies
    assert state_copies is not None
    assert [slots.tolist() for slots in state_copies] == [[3, 6], [5, 3]]
