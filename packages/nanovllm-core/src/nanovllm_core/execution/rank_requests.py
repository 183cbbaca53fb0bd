"""Selects the part of a step's plan that concerns the requests of one rank."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.parallel import ParallelContext
from nanovllm_core.scheduling.plan import NewBlocks, NewRow, PromptLogprobsRange, ScheduledRows


class RankRequests:
    """Selects the rows of one rank's requests: all rows, unless ranks have different requests.

    The row numbers of a plan cover all ranks. If ranks have different requests, each rank has `num_rows` consecutive
    rows. In the rank's own tables, the rank's first row is row 0.
    """

    def __init__(self, parallel: ParallelContext, num_rows: int):
        self._num_groups = parallel.num_request_groups
        self._group = parallel.rank if parallel.splits_requests else 0
        self._num_rows = num_rows
        self._first_row = self._group * num_rows

    def select_new_rows(self, new_rows: Sequence[NewRow]) -> Sequence[NewRow]:
        """The new rows of this rank."""
        if self._num_groups == 1:
            return new_rows
        return [
            replace(new_row, row=new_row.row - self._first_row) for new_row in new_rows if self._is_own(new_row.row)
        ]

    def select_blocks(self, blocks: NewBlocks) -> NewBlocks:
        """The new blocks of this rank."""
        if self._num_groups == 1:
            return blocks
        own_indices = [index for index, row in enumerate(blocks.rows) if self._is_own(row)]
        return NewBlocks(
            [blocks.rows[index] - self._first_row for index in own_indices],
            [blocks.entries[index] for index in own_indices],
            [blocks.block_ids[index] for index in own_indices],
        )

    def select_scheduled(self, scheduled: ScheduledRows) -> ScheduledRows:
        """The scheduled rows of this rank, in the plan's order."""
        if self._num_groups == 1:
            return scheduled
        is_own = scheduled.rows // self._num_rows == self._group
        rows, num_tokens, is_sampled = scheduled
        return ScheduledRows(rows[is_own] - self._first_row, num_tokens[is_own], is_sampled[is_own])

    def count_with_padding(self, num_own_reqs: int, num_reqs: int) -> int:
        """The number of requests that this rank computes, including padding.

        num_own_reqs: number of this rank's requests in the step.
        num_reqs: number of requests that each rank computes if ranks have different requests.
        """
        return num_own_reqs if self._num_groups == 1 else num_reqs

    def find_sampling_indices(self, scheduled: ScheduledRows, num_reqs: int) -> NDArray[np.int64]:
        """The index of each sampling request among the requests of all ranks. The result is in the plan's order.

        The requests of all ranks are in the order of `ParallelContext.gather_requests`: each rank has `num_reqs`
        requests, including padding.
        """
        if self._num_groups == 1:
            return np.flatnonzero(scheduled.is_sampled)
        groups = scheduled.rows // self._num_rows
        indices = np.zeros(len(groups), np.int64)
        for group in range(self._num_groups):
            is_in_group = groups == group
            indices[is_in_group] = group * num_reqs + np.arange(np.count_nonzero(is_in_group))
        return indices[scheduled.is_sampled]

    def locate_prompt(
        self, prompt_range: PromptLogprobsRange, scheduled: ScheduledRows
    ) -> tuple[int, PromptLogprobsRange]:
        """Returns (rank that has the prompt, range).

        If this rank has the prompt, the range is `prompt_range` with this rank's own row number and logits index. If
        not, both numbers are 0.
        """
        if self._num_groups == 1:
            return 0, prompt_range
        row = prompt_range.row
        if not self._is_own(row):
            return row // self._num_rows, prompt_range._replace(row=0, first_logits_index=0)
        index = int(np.flatnonzero(scheduled.rows == row)[0])
        is_of_other_rank = scheduled.rows[:index] // self._num_rows != self._group
        num_other_tokens = int(scheduled.num_tokens[:index][is_of_other_rank].sum())
        return self._group, prompt_range._replace(
            row=row - self._first_row, first_logits_index=prompt_range.first_logits_index - num_other_tokens
        )

    def _is_own(self, row: int) -> bool:
        return row // self._num_rows == self._group
