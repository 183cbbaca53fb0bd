"""Groups of requests, each with its own cache and rows."""

import numpy as np

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.plan import ScheduledStep, StepResults
from nanovllm_core.scheduling.prompt_scheduler import MAX_GROUP_IMBALANCE
from nanovllm_core.scheduling.scheduler import Scheduler

BLOCK_SIZE, NUM_GROUPS, ROWS_PER_GROUP, MAX_GROUP_TOKENS = 16, 2, 16, 256


def make_scheduler(num_blocks: int = 200) -> Scheduler:
    caches = [
        CacheManager(num_blocks, BLOCK_SIZE, prefix_caching=True, hash_algorithm="fast", watermark=0)
        for _ in range(NUM_GROUPS)
    ]
    limits = StepLimits(MAX_GROUP_TOKENS)
    max_num_seqs = NUM_GROUPS * ROWS_PER_GROUP
    return Scheduler(caches, max_num_seqs=max_num_seqs, limits=limits, max_model_len=2000, eos_token_ids=[1])


def add_request(scheduler: Scheduler, key: int, prompt: list[int], max_tokens: int = 500) -> RequestState:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = RequestState(key, Request(f"r{key}", prompt, sampling, arrival_time=float(key)))
    scheduler.add(request)
    return request


def run_step(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    num_samples = int(step.plan.scheduled.is_sampled.sum())
    scheduler.complete(step, StepResults(np.full(num_samples, 7, np.int32), ()))
    return step


def group_of(scheduler: Scheduler, request: RequestState) -> int:
    return scheduler.rows.group_of(request.row)


def test_requests_without_a_cached_prefix_spread_over_the_groups():
    scheduler = make_scheduler()
    requests = [add_request(scheduler, key, [key + 2] * 20) for key in range(8)]
    step = run_step(scheduler)
    assert sum(group_of(scheduler, request) for request in requests) == 4
    assert step.plan.shape.num_reqs == 4
    assert step.plan.shape.num_tokens == 4 * 20


def test_each_group_computes_at_most_its_own_budget_of_tokens():
    scheduler = make_scheduler()
    for key in range(3):
        add_request(scheduler, key, [key + 2] * 200)
    shape = run_step(scheduler).plan.shape
    # One group also computes whole blocks of the third prompt.
    num_tokens = 200 + (MAX_GROUP_TOKENS - 200) // BLOCK_SIZE * BLOCK_SIZE
    assert (shape.num_reqs, shape.num_tokens) == (2, num_tokens)
    assert scheduler.counters.num_computed_tokens == num_tokens + 200


def test_a_request_joins_the_group_that_has_cached_its_prefix():
    scheduler = make_scheduler()
    prefix = [*range(3, 100)]
    first = add_request(scheduler, 0, prefix)
    add_request(scheduler, 1, [2] * 20)
    run_step(scheduler)
    cached_group = group_of(scheduler, first)
    later = [add_request(scheduler, key, [*prefix, key]) for key in range(2, 5)]
    run_step(scheduler)
    assert [group_of(scheduler, request) for request in later] == [cached_group] * 3
    assert all(request.num_cached_tokens == 96 for request in later)


def test_a_prefix_that_all_requests_share_does_not_fill_one_group_only():
    scheduler = make_scheduler()
    prefix = [*range(3, 100)]
    add_request(scheduler, 0, prefix)
    run_step(scheduler)
    for key in range(1, 25):
        add_request(scheduler, key, [*prefix, key])
    for _ in range(6):
        run_step(scheduler)
    num_running = [len(scheduler.rows.running_rows(group)) for group in range(NUM_GROUPS)]
    assert sum(num_running) == 25
    assert abs(num_running[0] - num_running[1]) <= MAX_GROUP_IMBALANCE + 1


def test_a_request_starts_in_the_other_group_if_the_first_lacks_blocks():
    scheduler = make_scheduler(num_blocks=12)
    first = add_request(scheduler, 0, [2] * 150)
    run_step(scheduler)
    second = add_request(scheduler, 1, [3] * 150)
    run_step(scheduler)
    assert {group_of(scheduler, first), group_of(scheduler, second)} == {0, 1}
    third = add_request(scheduler, 2, [4] * 150)
    run_step(scheduler)
    assert third.row == -1


def test_preemption_frees_blocks_of_the_group_that_lacks_them():
    scheduler = make_scheduler(num_blocks=4)
    requests = [add_request(scheduler, key, [key + 2] * 30, max_tokens=30) for key in range(4)]
    run_step(scheduler)
    groups = [group_of(scheduler, request) for request in requests]
    assert sorted(groups) == [0, 0, 1, 1]
    # The group of request 0 then has enough blocks, so only the other group preempts.
    scheduler.abort(0)
    while scheduler.counters.num_preemptions == 0:
        run_step(scheduler)
    (preempted,) = [request for request in requests if request.num_preemptions]
    assert groups[preempted.key] != groups[0]
    while scheduler.has_requests:
        run_step(scheduler)
    assert all(cache.pool.num_free == cache.pool.num_blocks for cache in scheduler.caches)
