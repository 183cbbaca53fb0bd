"""Divides a step's budget among prompts of requests with a row and of waiting requests."""

from typing import NamedTuple

import numpy as np

from nanovllm_core.cache.manager import BlockShortage
from nanovllm_core.request import Request
from nanovllm_core.scheduling.budget import StepBudget, StepLimits
from nanovllm_core.scheduling.lifecycle import Lifecycle
from nanovllm_core.scheduling.plan import NewBlocks, NewRow, NewState
from nanovllm_core.scheduling.policy import MAX_BYPASSES, OLDEST_SHARE, request_class
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# Waiting requests that are considered for a step.
WINDOW = 64
# Chunks end at multiples of this many tokens, or of the block size if that is smaller. A larger unit adds padding.
CHUNK_UNIT = 16
# Requests that lacked blocks are retried after this many steps, as others may have cached blocks that they share.
RETRY_STEPS = 16


class Chunk(NamedTuple):
    """The part of a prompt that a step computes: `num_tokens` tokens of a row."""

    row: int
    num_tokens: int


class PromptChunks(NamedTuple):
    """The chunks of a step, with new rows and blocks of requests that the step admits."""

    chunks: list[Chunk]
    new_rows: list[NewRow]
    new_blocks: NewBlocks


class _Candidate(NamedTuple):
    """A prompt that the step may compute.

    start, end: the range of tokens still to compute. For a waiting request `start` is an estimate: the cached tokens at
        the last search.
    """

    request: Request
    start: int
    end: int


class PromptScheduler:
    """Chooses the prompts of each step.

    Within the most urgent class of requests, the prompt with the least work left goes first. The oldest prompt of the
    class always gets a share of the time. A request that lacks blocks is overtaken at most MAX_BYPASSES times.
    """

    def __init__(self, lifecycle: Lifecycle, limits: StepLimits, model: StepTimeModel):
        self._lifecycle = lifecycle
        self._limits = limits
        self._cache = lifecycle.cache
        self._rows = lifecycle.rows
        self._model = model
        # Cached tokens of waiting requests at the last search, by key.
        self._hits: dict[int, int] = {}
        # Free blocks needed by waiting requests that lacked blocks, by key.
        self._needed_blocks: dict[int, int] = {}
        self._num_windows = 0
        # The first request that lacked blocks, and how many others were admitted since.
        self._blocked: Request | None = None
        self._num_bypasses = 0
        # Steps in a row in which the oldest prompt got less than its share.
        self._num_passed_over = 0

    def plan(self, decodes: StepWork, planned: PromptChunks, *, may_admit: bool) -> None:
        """Add chunks to `planned`, with new rows and blocks for requests that are admitted if `may_admit`.

        decodes: the step's work without prompts.
        """
        candidates = self._running()
        if may_admit and self._rows.num_free:
            candidates += self._waiting()
        if not candidates:
            return
        budget = StepBudget(self._limits, self._model, decodes, min(self._cache.block_size, CHUNK_UNIT))
        candidates.sort(key=self._order)
        most_urgent = request_class(candidates[0].request)
        oldest = min(
            (each for each in candidates if request_class(each.request) == most_urgent),
            key=lambda each: each.request.arrival_time,
        )
        if self._num_passed_over >= 1 / OLDEST_SHARE - 1:
            candidates.remove(oldest)
            candidates.insert(0, oldest)
        seconds = [self._serve(candidate, budget, planned) for candidate in candidates]
        is_served = any(chunk.row == oldest.request.row for chunk in planned.chunks)
        is_fair = is_served and seconds[candidates.index(oldest)] >= OLDEST_SHARE * sum(seconds)
        self._num_passed_over = 0 if is_fair else self._num_passed_over + 1
        # A burst of short prompts may be larger than the window.
        while may_admit and not budget.is_full and self._rows.num_free:
            num_admitted = len(planned.new_rows)
            for candidate in sorted(self._waiting(), key=self._order):
                self._serve(candidate, budget, planned)
            if len(planned.new_rows) == num_admitted:
                break

    def _serve(self, candidate: _Candidate, budget: StepBudget, planned: PromptChunks) -> float:
        """Add a chunk of the prompt within the budget, and return the predicted seconds of the chunk."""
        num_tokens = budget.chunk(candidate.start, candidate.end)
        if num_tokens == 0:
            return 0.0
        if candidate.request.row >= 0:
            planned.chunks.append(Chunk(candidate.request.row, num_tokens))
            return budget.take(candidate.start, candidate.end, num_tokens)
        if self._rows.num_free and not self._must_wait(candidate.request):
            return self._admit(candidate.request, budget, planned)
        return 0.0

    def _running(self) -> list[_Candidate]:
        rows = self._rows
        begun = np.flatnonzero(rows.running & (rows.num_tokens - rows.num_computed > 1))
        starts, ends = rows.num_computed[begun].tolist(), rows.num_tokens[begun].tolist()
        return list(map(_Candidate, rows.requests_of(begun), starts, ends))

    def _waiting(self) -> list[_Candidate]:
        window = list(self._lifecycle.waiting.first(WINDOW))
        if self._blocked is not None and self._blocked not in self._lifecycle.waiting:
            self._blocked = None
        hits = {
            request.key: self._cache.estimate_cached_tokens(request, self._hits.get(request.key)) for request in window
        }
        self._num_windows += 1
        if self._num_windows % RETRY_STEPS == 0:
            self._needed_blocks.clear()
        # Forget the needed blocks of requests whose number of hits has changed.
        self._needed_blocks = {
            key: num_blocks for key, num_blocks in self._needed_blocks.items() if hits.get(key) == self._hits.get(key)
        }
        self._hits = hits
        return [
            _Candidate(request, hits[request.key], request.num_tokens)
            for request in window
            if not self._must_wait(request)
        ]

    def _order(self, candidate: _Candidate) -> tuple[tuple[int, int], float, int, float]:
        request, start, end = candidate
        left = end - start
        return request_class(request), self._model.chunk_seconds(start, left), left, request.arrival_time

    def _must_wait(self, request: Request) -> bool:
        """Whether `request` is known to lack blocks, or must not overtake the blocked request again."""
        num_blocks = self._needed_blocks.get(request.key, 0)
        # `num_blocks` includes the watermark, which an idle engine does not keep free.
        if self._cache.pool.num_free < num_blocks and self._rows.num_running > 0:
            return True
        blocked = self._blocked
        if blocked is None or request is blocked or self._num_bypasses < MAX_BYPASSES:
            return False
        return request_class(request) >= request_class(blocked)

    def _admit(self, request: Request, budget: StepBudget, planned: PromptChunks) -> float:
        num_computed = self._cache.admit(request, keep_watermark=self._rows.num_running > 0)
        if isinstance(num_computed, BlockShortage):
            self._needed_blocks[request.key] = num_computed.num_blocks
            if self._blocked is None:
                self._blocked, self._num_bypasses = request, 0
            return 0.0
        num_tokens = budget.chunk(num_computed, request.num_tokens)
        if num_tokens == 0:
            self._cache.release(request)
            return 0.0
        self._num_bypasses += 1
        self._lifecycle.start(request, num_computed)
        planned.new_rows.append(_new_row(request, num_computed))
        planned.new_blocks.add(request.row, 0, request.block_ids)
        planned.chunks.append(Chunk(request.row, num_tokens))
        return budget.take(num_computed, request.num_tokens, num_tokens)


def _new_row(request: Request, num_computed: int) -> NewRow:
    return NewRow(
        row=request.row,
        token_ids=request.known_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed,
        sampling=request.sampling,
        seed=request.seed,
        stop_ids=tuple(sorted(request.stop_ids)),
        compiled=request.compiled,
        state=NewState(request.state_slot, request.state_origin, tuple(request.checkpoints)),
    )
