"""Decides, step by step, which requests compute how many tokens, and keeps their state as steps come back.

One rule: a request has `num_computed_tokens` chasing `num_tokens`, and a step gives each some tokens out of one
budget. Several steps may be in flight: `schedule` is called before the last step's tokens are known, `complete` when
they are. Whatever ends a request's hold on its row and blocks (finish, abort, preemption) goes through one exit, which
waits until no step in flight refers to it. This room must not know about devices, tensors, text or asyncio.
"""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import FinishReason, Request, RequestOutput, RequestStatus, TokenLogprobs
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, NewRow, ScheduledRow, StepPlan, TokenChoice
from nanovllm_core.scheduling.policy import victim_score
from nanovllm_core.scheduling.queue import WaitingQueue


class ScheduledRequest(NamedTuple):
    """A request's part in a step: it computes `num_tokens` tokens, up to `end`, and samples one more if `samples`."""

    request: Request
    num_tokens: int
    end: int
    samples: bool


class ScheduledStep(NamedTuple):
    """A step in flight: the plan for the runners, and whom it concerns, in the plan's order."""

    plan: StepPlan
    entries: list[ScheduledRequest]


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start. tokens: computed, prompts and decodes alike. prefix_queries, prefix_hits: in tokens."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    tokens: int = 0


class Scheduler:
    """Requests from the queue to their last token."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int = 0,
    ):
        self.cache = cache
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        # By priority, then arrival: who comes first here is the last to lose its blocks.
        self.running: list[Request] = []
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Requests that are over or preempted, and whose row and blocks wait for a step in flight.
        self._num_finishing = 0
        self._num_preempting = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a row, those included whose preemption waits for a step in flight."""
        return len(self.waiting) + self._num_preempting

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to do, be it only to take back what finished requests held."""
        return bool(self._requests) or self._num_finishing > 0

    def add(self, request: Request) -> None:
        """Queue a new request, already checked. Raises ValueError when its id is taken."""
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in use")
        sampling = request.sampling
        room = self._max_model_len - request.num_prompt_tokens
        request.max_total_tokens = request.num_prompt_tokens + min(room, sampling.max_tokens or room)
        request.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            request.stop_ids |= self._eos_token_ids
        request.seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        self._requests[request.id] = request
        self.waiting.push(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; what it holds comes back once no step refers to it. False if it is unknown or over."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or return None when there is nothing that could be computed now."""
        preemptions = self.counters.preemptions
        new_blocks: list[NewBlocks] = []
        decodes = self._schedule_decodes(new_blocks)
        budget = self._max_num_batched_tokens - len(decodes)
        prefills: list[ScheduledRequest] = []
        new_rows: list[NewRow] = []
        budget = self._schedule_chunks(prefills, budget)
        # Whoever was just preempted needs the next free blocks more than a newcomer does.
        if self.counters.preemptions == preemptions and self._num_preempting == 0:
            self._admit(prefills, new_rows, new_blocks, budget)
        # A chunk of one token is a decode to the kernels.
        entries = decodes + sorted(prefills, key=lambda entry: entry.num_tokens != 1)
        return self._launch(entries, new_rows, new_blocks) if entries else None

    def complete(self, step: ScheduledStep, choices: Sequence[TokenChoice]) -> list[RequestOutput]:
        """Take in what a step computed: `choices` has one entry for each entry of the step that samples, in order."""
        outputs: list[RequestOutput] = []
        upcoming = iter(choices)
        for request, _, end, samples in step.entries:
            choice = next(upcoming) if samples else None
            request.steps_in_flight -= 1
            if request.status is not RequestStatus.FINISHED:
                self.cache.commit(request, end)
                if choice is not None:
                    request.num_placeholders -= 1
                    outputs.append(self._append(request, choice))
                    if outputs[-1].finish_reason is not None:
                        continue  # _finish has seen to its release
            if request.status is not RequestStatus.RUNNING:
                self._release_when_idle(request)
        return outputs

    def _schedule_decodes(self, new_blocks: list[NewBlocks]) -> list[ScheduledRequest]:
        """One token for every running request that has its prompt behind it, and blocks to put it in."""
        entries: list[ScheduledRequest] = []
        scheduled: set[str] = set()
        for request in list(self.running):
            end = request.num_tokens
            if (
                end - request.num_computed_tokens != 1
                or end >= request.max_total_tokens
                or request.status is not RequestStatus.RUNNING  # preempted for one before it in this very pass
            ):
                continue
            before = len(request.block_ids)
            if not self._grow(request, end, scheduled):
                continue
            if len(request.block_ids) > before:
                new_blocks.append(NewBlocks(request.row, before, request.block_ids[before:]))
            scheduled.add(request.id)
            entries.append(ScheduledRequest(request, 1, end, samples=True))
        return entries

    def _grow(self, request: Request, num_tokens: int, scheduled: set[str]) -> bool:
        """Get blocks for a decode, from less urgent requests if need be; False if it must sit this step out."""
        while not self.cache.grow(request, num_tokens):
            # Blocks are on their way back with a step in flight: take nobody else's meanwhile.
            if self._num_preempting or self._num_finishing:
                return False
            victim = max((other for other in self.running if other.id not in scheduled), key=victim_score)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _schedule_chunks(self, entries: list[ScheduledRequest], budget: int) -> int:
        """Go on with prompts that earlier steps began; returns what is left of the budget."""
        for request in self.running:
            remaining = request.num_tokens - request.num_computed_tokens
            if remaining > 1:
                chunk = self._chunk(request, remaining, budget)
                if chunk == 0:
                    return 0
                entries.append(self._part(request, chunk))
                budget -= chunk
        return budget

    def _admit(
        self,
        entries: list[ScheduledRequest],
        new_rows: list[NewRow],
        new_blocks: list[NewBlocks],
        budget: int,
    ) -> None:
        while budget > 0 and self._free_rows and (request := self.waiting.peek()) is not None:
            if not self.cache.admit(request, keep_watermark=bool(self.running)):
                return
            remaining = request.num_tokens - request.num_computed_tokens
            chunk = self._chunk(request, remaining, budget)
            if chunk == 0:
                self.cache.release(request)
                request.num_computed_tokens = 0
                return
            self.waiting.remove(request)
            self._start(request)
            new_rows.append(self._new_row(request))
            new_blocks.append(NewBlocks(request.row, 0, list(request.block_ids)))
            entries.append(self._part(request, chunk))
            budget -= chunk

    def _chunk(self, request: Request, remaining: int, budget: int) -> int:
        """Tokens to compute of a prompt: all that remain, or up to the last block boundary that the budget reaches."""
        if remaining <= budget:
            return remaining
        start, size = request.num_computed_tokens, self.cache.block_size
        return max((start + budget) // size * size - start, 0)

    def _part(self, request: Request, chunk: int) -> ScheduledRequest:
        end = request.num_computed_tokens + chunk
        return ScheduledRequest(request, chunk, end, samples=end == request.num_tokens)

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        bisect.insort(self.running, request, key=_urgency)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prompt_tokens += request.num_prompt_tokens
            if self.cache.prefix_caching:
                self.counters.prefix_queries += request.num_prompt_tokens
                self.counters.prefix_hits += request.num_cached_tokens

    def _new_row(self, request: Request) -> NewRow:
        return NewRow(
            row=request.row,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            sampling=request.sampling,
            seed=request.seed,
            stop_ids=tuple(sorted(request.stop_ids)),
        )

    def _launch(
        self, entries: list[ScheduledRequest], new_rows: list[NewRow], new_blocks: list[NewBlocks]
    ) -> ScheduledStep:
        rows: list[ScheduledRow] = []
        num_tokens = max_seq_len = 0
        for request, count, end, samples in entries:
            rows.append(ScheduledRow(request.row, count, samples))
            request.num_computed_tokens = end
            request.num_placeholders += samples
            request.steps_in_flight += 1
            num_tokens += count
            max_seq_len = max(max_seq_len, end)
        query_len = num_tokens // len(rows)
        uniform = all(row.num_tokens == query_len for row in rows)
        plan = StepPlan(
            step=self.counters.steps,
            new_rows=new_rows,
            new_blocks=new_blocks,
            scheduled=rows,
            shape=BatchShape(len(rows), num_tokens, query_len if uniform else None),
            max_seq_len=max_seq_len,
        )
        self.counters.steps += 1
        self.counters.tokens += num_tokens
        return ScheduledStep(plan, entries)

    def _append(self, request: Request, choice: TokenChoice) -> RequestOutput:
        token = choice.token
        request.token_ids.append(token)
        self.counters.generation_tokens += 1
        reason: FinishReason | None = None
        if token in request.stop_ids:
            reason = "stop"
        elif len(request.token_ids) >= request.max_total_tokens:
            reason = "length"
        logprobs = None if choice.logprob is None else (TokenLogprobs(choice.logprob, choice.top),)
        if reason is not None:
            self._finish(request)
        return RequestOutput(
            id=request.id,
            new_token_ids=(token,),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            logprobs=logprobs,
            finish_reason=reason,
            stop_token=token if reason == "stop" else None,
        )

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it will compute its tokens again. Its tokens in flight still count."""
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._num_preempting += 1
        self._release_when_idle(request)

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif not self.waiting.remove(request):
            self._num_preempting -= 1
        request.status = RequestStatus.FINISHED
        # Its id is free again at once, whenever its blocks come back.
        del self._requests[request.id]
        self._num_finishing += 1
        self._release_when_idle(request)

    def _release_when_idle(self, request: Request) -> None:
        """The one exit: give back row and blocks, unless a step in flight still refers to them."""
        if request.steps_in_flight > 0:
            return
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row = -1
            self.cache.release(request)
        if request.status is RequestStatus.FINISHED:
            self._num_finishing -= 1
        else:
            self._num_preempting -= 1
            request.num_computed_tokens = 0
            self.waiting.push(request)


def _urgency(request: Request) -> tuple[int, float]:
    return (request.priority, request.arrival_time)
