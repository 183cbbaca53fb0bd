import random

import numpy as np
import pytest
import torch

from nanovllm_core.execution.rank_requests import RankRequests
from nanovllm_core.execution.request_table import RequestTable
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.plan import (
    BatchShape,
    NewBlocks,
    NewRow,
    PromptLogprobsRange,
    ScheduledRows,
    StepPlan,
)
from nanovllm_core.token_ids import as_token_ids

NUM_RANKS, ROWS_PER_RANK = 3, 5


def make_parallel_contexts() -> list[ParallelContext]:
    return [ParallelContext(rank, NUM_RANKS, splits_requests=True) for rank in range(NUM_RANKS)]


def draw_scheduled(rng: random.Random) -> ScheduledRows:
    num_rows = rng.randrange(1, NUM_RANKS * ROWS_PER_RANK + 1)
    lengths = sorted(rng.choice([1, 1, 4, 9]) for _ in range(num_rows))
    is_sampled = [rng.random() < 0.7 for _ in range(num_rows)]
    rows = rng.sample(range(NUM_RANKS * ROWS_PER_RANK), num_rows)
    return ScheduledRows(np.array(rows), np.array(lengths), np.array(is_sampled))


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_all_ranks_make_up_the_scheduled_rows(seed):
    scheduled = draw_scheduled(random.Random(seed))
    ranks = [RankRequests(parallel, ROWS_PER_RANK) for parallel in make_parallel_contexts()]
    parts = [rank.select_scheduled(scheduled) for rank in ranks]
    num_reqs = max(len(part.rows) for part in parts)
    # Entries (row, num_tokens, is_sampled, rank) in the order in which tokens are gathered. Padding has the row None.
    gathered = [
        (*columns, rank)
        for rank, part in enumerate(parts)
        for columns in [*zip(*(column.tolist() for column in part), strict=True)]
        + [(None, 0, False)] * (num_reqs - len(part.rows))
    ]
    for rank in ranks:
        indices = rank.find_sampling_indices(scheduled, num_reqs)
        expected = [row for row, samples in zip(scheduled.rows, scheduled.is_sampled, strict=True) if samples]
        assert [gathered[index][0] + ROWS_PER_RANK * gathered[index][3] for index in indices] == expected
        assert all(gathered[index][2] for index in indices)
    assert sum(len(part.rows) for part in parts) == len(scheduled.rows)
    for part in parts:
        lengths = part.num_tokens.tolist()
        assert lengths == sorted(lengths), "the order within a rank is not that of the plan"


@pytest.mark.parametrize("seed", range(20))
def test_the_rank_that_has_a_prompt_finds_its_tokens(seed):
    rng = random.Random(seed)
    scheduled = draw_scheduled(rng)
    index = rng.randrange(len(scheduled.rows))
    row, first = int(scheduled.rows[index]), int(scheduled.num_tokens[:index].sum())
    prompt_range = PromptLogprobsRange(row, 1, 1, 2, first)
    for rank, parallel in enumerate(make_parallel_contexts()):
        requests = RankRequests(parallel, ROWS_PER_RANK)
        owner, own_range = requests.locate_prompt(prompt_range, scheduled)
        assert owner == row // ROWS_PER_RANK
        if rank != owner:
            assert (own_range.row, own_range.first_logits_index) == (0, 0)
            continue
        part = requests.select_scheduled(scheduled)
        own_index = part.rows.tolist().index(own_range.row)
        assert own_range.row == row - rank * ROWS_PER_RANK
        assert own_range.first_logits_index == part.num_tokens[:own_index].sum()


def test_tables_hold_the_requests_of_their_rank_only():
    sampling = SamplingParams(temperature=0.5, logprobs=3)
    new_rows = [NewRow(row, as_token_ids([row, 7]), 2, 0, sampling, seed=row, stop_ids=()) for row in (1, 6)]
    blocks = NewBlocks()
    blocks.add(1, 0, [4])
    blocks.add(6, 0, [9])
    scheduled = ScheduledRows(np.array([1, 6]), np.array([2, 2]), np.array([True, True]))
    plan = StepPlan(0, new_rows, blocks, scheduled, BatchShape(1, 2, 2), max_seq_len=2)
    for rank, parallel in enumerate(make_parallel_contexts()):
        table = RequestTable(ROWS_PER_RANK, 64, 16, 50, 1, torch.device("cpu"), parallel=parallel)
        step = table.apply_plan(plan, 2)
        assert step.device_rows.query_start_loc.tolist() == ([0, 2, 2] if rank < 2 else [0, 0, 0])
        assert step.query_lens.tolist() == ([2] if rank < 2 else [])
        assert step.sampling_indices.tolist() == [0, 2]
        assert step.num_logprobs.tolist() == [3, 3]
        assert table.block_table[:, 0].tolist() == [[0, 4, 0, 0, 0], [0, 9, 0, 0, 0], [0] * 5][rank]
        assert table.tokens[1, :2].tolist() == [[1, 7], [6, 7], [0, 0]][rank]
