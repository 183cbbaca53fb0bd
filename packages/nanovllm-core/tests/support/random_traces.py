"""Random traces of requests through scheduler and cache, on a simulated device that checks every slot that it reads.

`python random_traces.py [--blocks N] [--groups N ...]` runs N blocks of seeds; test_traces.py runs a sample.
"""

import argparse
import random
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from simulated_device import EOS, VOCAB, Device, SimulatedFiles, SimulatedHost, digest, next_token, run_plan

from nanovllm_core.cache.host_memory import Direction, EntryKind, HostLayout
from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.state_pool import StatePool
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.draft_times import DraftLimits
from nanovllm_core.scheduling.plan import StepPlan
from nanovllm_core.scheduling.scheduler import Scheduler

TRACES_PER_BLOCK = 125


def expected_output(request: RequestState, limit: int, eos_rate: int) -> list[int]:
    prefix_digest, output = 1, []
    for token in request.prompt_ids.tolist():
        prefix_digest = digest(prefix_digest, token)
    while len(output) < limit:
        output.append(next_token(prefix_digest, eos_rate))
        if output[-1] == EOS and not request.sampling.ignore_eos:
            break
        prefix_digest = digest(prefix_digest, output[-1])
    return output


def expected_scores(request: RequestState) -> list[int]:
    return [*accumulate(request.prompt_ids.tolist(), digest, initial=1)][2:]


def held_by_copies(tier: HostTier | None, group: int, kind: EntryKind) -> list[int]:
    if tier is None:
        return []
    loads = [*tier._new_loads, *(load for batch in tier._in_flight[Direction.LOAD] for load in batch.loads)]
    entries = [entry for load in loads if load.group == group for entry_kind, entry in load.held if entry_kind is kind]
    stores = [copy for batch in tier._in_flight[Direction.STORE] for copy in batch.copies]
    return entries + [store.entry for store in stores if (store.group, store.kind) == (group, kind)]


def check_ownership(
    cache: CacheManager, requests: list[RequestState], held_blocks: Sequence[int], held_slots: Sequence[int]
) -> None:
    """requests: all requests of the group that have a row or a load."""
    num_holders = Counter(block for request in requests for block in request.block_ids) + Counter(held_blocks)
    pool = cache.pool
    for block in range(1, pool.num_blocks + 1):
        assert pool.count_holders(block) == num_holders[block]
    assert pool.num_free == pool.num_blocks - len(num_holders)
    assert 0 not in num_holders, "the null block was given out"
    states = cache.state_pool
    if states is not None:
        slots = [slot for request in requests for slot in (request.state_slot, *(c.slot for c in request.checkpoints))]
        slots = [slot for slot in slots if slot]
        assert len(set(slots)) == len(slots), "a state slot was given out twice"
        assert states.slots.num_free == states.slots.num_blocks - len(
            {*slots, *held_slots, *states._held_sources.values()}
        )
        assert states._held_sources.keys() <= {request.key for request in requests}
        assert all(bool(request.state_slot) == bool(request.block_ids) for request in requests)
    for request in requests:
        assert len(set(request.block_ids)) == len(request.block_ids)


def check_plan(scheduler: Scheduler, plan: StepPlan, decodes: set[int], budget: int) -> None:
    counts = plan.scheduled.num_tokens.tolist()
    assert min(counts) >= 1
    assert counts == sorted(counts, key=lambda count: count != 1), "decodes must come first"
    rows = plan.scheduled.rows.tolist()
    assert len(set(rows)) == len(rows)
    groups = [scheduler.rows.group_of(row) for row in rows]
    tokens_by_group = Counter()
    for group, count in zip(groups, counts, strict=True):
        tokens_by_group[group] += count
    assert plan.shape.num_tokens == max(tokens_by_group.values()) <= budget
    assert not plan.shape.has_drafts or set(rows) <= decodes
    assert plan.shape.num_reqs == max(Counter(groups).values())
    new_groups = {scheduler.rows.group_of(new.row) for new in plan.new_rows}
    group_decodes = {row for row in decodes if scheduler.rows.group_of(row) in new_groups}
    assert group_decodes <= set(rows), "a prefill was admitted although a running decode of its group was left out"


class Trace:
    def __init__(self, seed: int, num_groups: int):
        rng = self.rng = random.Random(seed)
        self.block_size = rng.choice([2, 4, 16])
        self.eos_rate = rng.choice([0, 30, 200])
        # Checkpoints are at multiples of 64 tokens, so recurrent models need more tokens per request.
        is_recurrent = rng.random() < 0.2
        self.max_model_len = 150 if is_recurrent else rng.choice([24, 64])
        blocks_per_request = -(-self.max_model_len // self.block_size)
        num_blocks = blocks_per_request * rng.choice([1, 2, 4]) + rng.randrange(3)
        max_num_seqs = rng.choice([1, 3, 8])
        self.budget = max_num_seqs + self.block_size + rng.choice([0, 5, 200])
        self.max_steps_in_flight = rng.choice([1, 2, 3])
        cache_options = {
            "prefix_caching": (prefix_caching := rng.random() < 0.8),
            "hash_algorithm": rng.choice(["fast", "sha256"]),
            "watermark": rng.choice([0, 0.1]),
        }
        # A decode with drafts may fill at most one new block, so `block_size - 1` drafts are the maximum.
        max_drafts = 0 if is_recurrent or num_groups > 1 else rng.choice([0, 1, self.block_size - 1])
        num_slots = max_num_seqs + prefix_caching * rng.choice([1, 3, 20]) if is_recurrent else 0
        self.rows_per_group = max_num_seqs
        self.devices = [
            Device(self.block_size, self.eos_rate, states={} if is_recurrent else None, max_drafts=max_drafts)
            for _ in range(num_groups)
        ]
        self.host, tier = None, None
        if prefix_caching and rng.random() < 0.6:
            num_host_slots = (rng.choice([1, num_blocks, 5 * num_blocks]), rng.choice([1, 2 * num_slots + 1]))
            kinds = slice(2 if is_recurrent else 1)
            layout = HostLayout(1, 1, (1, 1)[kinds], num_host_slots[kinds])
            self.host = SimulatedHost(layout, self.devices, rng, failure_rate=rng.choice([0, 0, 0.1]))
            compute_s = rng.choice([1e9, 1e9, 1e9, 0])
            files = SimulatedFiles(self.host, rng) if rng.random() < 0.7 else None
            tier = HostTier(self.host, self.block_size, lambda *_: compute_s, files)
        caches = [
            CacheManager(
                num_blocks,
                self.block_size,
                state_pool=StatePool(num_slots, max_num_seqs, self.block_size) if is_recurrent else None,
                tier=tier,
                **cache_options,
            )
            for _ in range(num_groups)
        ]
        self.scheduler = Scheduler(
            caches,
            max_num_seqs=num_groups * max_num_seqs,
            limits=StepLimits(self.budget),
            max_model_len=self.max_model_len,
            eos_token_ids=[EOS],
            draft_limits=DraftLimits(max_drafts, self.budget),
            tier=tier,
        )
        self.prefixes = [
            [rng.randrange(VOCAB) for _ in range(self.max_model_len)] for _ in range(1 if is_recurrent else 2)
        ]
        self.requests: list[RequestState] = []
        self.aborted: set[int] = set()
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.scores: dict[int, list[int]] = {}
        self.num_resumed_midway = self.num_restored = self.num_accepted = self.num_rejected = 0
        self.in_flight: deque = deque()

    def submit(self) -> None:
        rng = self.rng
        length = rng.randrange(1, self.max_model_len)
        shared = rng.randrange(length + 1) if rng.random() < 0.6 else 0
        if self.devices[0].states is not None and rng.random() < 0.7:
            shared = min(length, rng.choice([70, 130]))
        prompt = rng.choice(self.prefixes)[:shared] + [rng.randrange(VOCAB) for _ in range(length - shared)]
        client_request = Request(
            id=f"r{len(self.requests)}",
            token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=rng.choice([None, 1, 2, 20]) if length < self.max_model_len - 20 else None,
                ignore_eos=rng.random() < 0.2,
                prompt_logprobs=rng.choice([None, None, 0, 3]),
            ),
            cache_salt=rng.choice(["", "", "tenant"]),
            priority=rng.choice([0, 0, 0, -1, 1]),
            arrival_time=float(len(self.requests)),
        )
        request = RequestState(len(self.requests), client_request)
        self.requests.append(request)
        self.outputs[request.key] = []
        self.scores[request.key] = []
        self.scheduler.add(request)

    def move_copies(self, *, has_plan: bool) -> None:
        if self.host is not None:
            self.host.launch(self.scheduler.take_copies(has_plan=has_plan))
            self.host.advance()

    def step(self) -> bool:
        scheduler = self.scheduler
        scheduler.complete_copies()
        self.move_copies(has_plan=False)
        while len(self.in_flight) < self.max_steps_in_flight:
            rows = scheduler.rows
            decodes = {
                request.row
                for request in scheduler.running_requests
                if rows.num_tokens[request.row] - rows.num_computed_tokens[request.row] == 1
                and rows.num_tokens[request.row] < request.max_total_tokens
            }
            step = scheduler.schedule()
            self.move_copies(has_plan=True)
            if step is None:
                break
            check_plan(scheduler, step.plan, decodes, self.budget)
            for new in step.plan.new_rows:
                (request,) = scheduler.rows.requests_of(np.array([new.row]))
                if 0 < len(self.scores[request.key]) < request.num_prompt_tokens - 1:
                    self.num_resumed_midway += 1
                self.num_restored += new.state.source_slot > 0
            self.in_flight.append((step, run_plan(self.devices, self.rows_per_group, step.plan)))
        if self.in_flight:
            num_accepted = [request.num_accepted_drafts for request in self.requests]
            outputs = scheduler.complete(*self.in_flight.popleft())
            num_tokens = Counter(outputs.keys)
            for key, total, _ in outputs.draft_totals:
                assert total - num_accepted[key] <= num_tokens[key], "a draft that is not in the output was accepted"
            for key, logprobs in outputs.prompt_logprobs:
                assert key not in self.aborted
                assert not self.outputs[key], "log-probabilities of a prompt came after the first token"
                self.scores[key].extend(np.frombuffer(logprobs.ranks, np.int64).tolist())
            for key, token in zip(outputs.keys, outputs.tokens, strict=True):
                assert key not in self.aborted
                assert key not in self.reasons, "an output after the last one"
                assert self.outputs[key] or key in {start.key for start in outputs.starts}
                self.outputs[key].append(token)
            for finish in outputs.finishes:
                assert finish.stop_token == (self.outputs[finish.key][-1] if finish.reason == "stop" else None)
                self.reasons[finish.key] = finish.reason
        for group, cache in enumerate(scheduler.caches):
            rows = scheduler.rows.requests[group * self.rows_per_group : (group + 1) * self.rows_per_group]
            loading = [load.request for load in scheduler._lifecycle._loads.values() if load.group == group]
            loaded = [loaded.request for loaded in scheduler._lifecycle.loaded.values() if loaded.group == group]
            requests = [*(request for request in rows if request is not None), *loading, *loaded]
            held_blocks, held_slots = (held_by_copies(scheduler.tier, group, kind) for kind in EntryKind)
            check_ownership(cache, requests, held_blocks, held_slots)
        return bool(self.in_flight)

    def abort_random_request(self) -> None:
        unfinished = [request for request in self.requests if request.status is not RequestStatus.FINISHED]
        if unfinished:
            request = self.rng.choice(unfinished)
            assert self.scheduler.abort(request.key)
            self.aborted.add(request.key)

    def run(self) -> None:
        # Entries are loaded only after they were stored and evicted, which takes more steps.
        for _ in range(self.rng.randrange(1, 12) * (1 if self.host is None else 3)):
            for _ in range(self.rng.randrange(5)):
                self.submit()
            if self.rng.random() < 0.2:
                self.abort_random_request()
            for _ in range(self.rng.randrange(6)):
                self.step()
        for _ in range(5000):
            if not self.step() and not self.scheduler.has_requests and not self.scheduler.has_copies:
                break
        self.check_end()

    def check_end(self) -> None:
        scheduler = self.scheduler
        planner = scheduler.draft_planner
        num_verified, num_accepted = ([], []) if planner is None else (planner.num_verified, planner.num_accepted)
        self.num_accepted = sum(num_accepted)
        self.num_rejected = sum(num_verified) - self.num_accepted
        assert self.num_accepted == sum(request.num_accepted_drafts for request in self.requests)
        assert self.num_rejected == sum(request.num_rejected_drafts for request in self.requests)
        assert all(accepted <= verified for accepted, verified in zip(num_accepted, num_verified, strict=True))
        for totals in (num_verified, num_accepted):
            assert list(totals) == sorted(totals, reverse=True)
        assert not scheduler.has_requests
        assert not scheduler.has_copies
        for pool in () if scheduler.tier is None else scheduler.tier.pools:
            assert pool.num_free == pool.num_blocks
        assert not scheduler.running_requests
        assert scheduler.num_waiting == 0
        for cache in scheduler.caches:
            assert cache.pool.num_free == cache.pool.num_blocks
            assert cache.pool.num_cached <= cache.pool.num_free
            if (states := cache.state_pool) is not None:
                assert states.slots.num_free == states.slots.num_blocks
        for request in self.requests:
            assert request.status is RequestStatus.FINISHED
            assert (request.row, request.block_ids, request.state_slot) == (-1, [], 0)
            limit = request.max_total_tokens - request.num_prompt_tokens
            expected = expected_output(request, limit, self.eos_rate)
            output = self.outputs[request.key]
            if request.key in self.aborted:
                assert output == expected[: len(output)]
                continue
            assert output == expected
            assert self.scores[request.key] == (
                [] if request.sampling.prompt_logprobs is None else expected_scores(request)
            )
            stopped = expected[-1] == EOS and not request.sampling.ignore_eos
            assert self.reasons[request.key] == ("stop" if stopped else "length")


def check_block_of_traces(block: int, num_groups: int) -> None:
    num_preemptions = num_hits = num_resumed = num_restored = num_accepted = num_rejected = 0
    num_loaded = num_from_files = num_failed_loads = num_rejected_load_tokens = 0
    for seed in range(block * TRACES_PER_BLOCK, (block + 1) * TRACES_PER_BLOCK):
        trace = Trace(seed, num_groups)
        try:
            trace.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_preemptions += trace.scheduler.counters.num_preemptions
        num_hits += trace.scheduler.counters.num_cached_tokens
        num_resumed += trace.num_resumed_midway
        num_restored += trace.num_restored
        num_accepted += trace.num_accepted
        num_rejected += trace.num_rejected
        planner = trace.scheduler.draft_planner
        assert planner is None or int(planner.num_accepted.sum()) == trace.num_accepted, f"seed {seed}"
        if (tier := trace.scheduler.tier) is not None:
            num_loaded += tier.counters.num_loaded_tokens
            num_from_files += tier.counters.num_file_tokens
            num_failed_loads += tier.counters.num_failed_loads
            num_rejected_load_tokens += tier.counters.num_rejected_tokens
    # Check that the traces cover the difficult cases.
    assert num_preemptions > 50
    assert num_hits > 500
    assert num_resumed > 0
    assert num_restored > 10
    assert num_loaded > 250
    assert num_from_files > 15
    assert num_failed_loads > 2
    assert num_rejected_load_tokens > 15
    assert num_groups > 1 or min(num_accepted, num_rejected) > 50


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--blocks", type=int, default=16)
    options.add_argument("--groups", type=int, nargs="+", default=[1, 2, 3])
    arguments = options.parse_args()
    for num_groups in arguments.groups:
        for block in range(arguments.blocks):
            check_block_of_traces(block, num_groups)
            print(f"{num_groups} groups | block {block} | as expected", flush=True)


if __name__ == "__main__":
    main()
