"""The Python work of a steady decode step does not grow with the number of requests."""

import time

import numpy as np
import pytest
from counting import count_calls

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.plan import StepResults
from nanovllm_core.scheduling.result_applier import COMMIT_INTERVAL_TOKENS
from nanovllm_core.scheduling.scheduler import Scheduler

BLOCK_SIZE, MAX_MODEL_LEN, EOS = 16, 256, 1
FEW_REQUESTS, MANY_REQUESTS = 8, 256


def make_scheduler(num_blocks: int, max_num_seqs: int, max_tokens: int, *, prefix_caching: bool = False) -> Scheduler:
    cache = CacheManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching, hash_algorithm="fast", watermark=0)
    return Scheduler(
        [cache],
        max_num_seqs=max_num_seqs,
        limits=StepLimits(max_tokens),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[EOS],
    )


def make_decoding_scheduler(num_requests: int, *, prefix_caching: bool) -> Scheduler:
    """The last block of each request has space for more than eight tokens."""
    scheduler = make_scheduler(4 * num_requests, num_requests, 64 * num_requests, prefix_caching=prefix_caching)
    for key in range(num_requests):
        request = Request(f"r{key}", [2 + key] * 36, SamplingParams(stop_token_ids=(0,)))
        scheduler.add(RequestState(key, request))
    run_step(scheduler, num_requests)
    return scheduler


def run_step(scheduler: Scheduler, num_requests: int) -> None:
    step = scheduler.schedule()
    outputs = scheduler.complete(step, StepResults(np.full(num_requests, 7, np.int32), ()))
    assert outputs.tokens == [7] * num_requests
    assert sorted(outputs.keys) == list(range(num_requests))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_calls_of_a_decode_step_do_not_depend_on_the_number_of_requests(prefix_caching: bool):
    counts = {}
    for num_requests in (FEW_REQUESTS, MANY_REQUESTS):
        scheduler = make_decoding_scheduler(num_requests, prefix_caching=prefix_caching)
        counts[num_requests] = [count_calls(run_step, scheduler, num_requests) for _ in range(8)]
    for few_count, many_count in zip(counts[FEW_REQUESTS], counts[MANY_REQUESTS], strict=True):
        assert few_count["call"] == many_count["call"] < 110
        assert few_count["c_call"] == many_count["c_call"]


def test_a_step_that_gives_each_request_a_block_makes_two_calls_per_request():
    counts = {}
    for num_requests in (FEW_REQUESTS, MANY_REQUESTS):
        scheduler = make_decoding_scheduler(num_requests, prefix_caching=False)
        counts[num_requests] = [count_calls(run_step, scheduler, num_requests)["call"] for _ in range(BLOCK_SIZE)]
    calls_per_request = [
        (many_count - few_count) / (MANY_REQUESTS - FEW_REQUESTS)
        for few_count, many_count in zip(counts[FEW_REQUESTS], counts[MANY_REQUESTS], strict=True)
    ]
    assert sum(extra > 0 for extra in calls_per_request) == 1
    assert max(calls_per_request) <= 2


def count_new_blocks(num_blocks: int, num_steps: int) -> tuple[list[int], list[int]]:
    """Returns the number of new blocks per step, and of unneeded blocks per request at the end."""
    num_requests = BLOCK_SIZE
    scheduler = make_scheduler(num_blocks, num_requests, 1024)
    for key in range(num_requests):
        request = Request(f"r{key}", [2] * (33 + key), SamplingParams(ignore_eos=True))
        scheduler.add(RequestState(key, request))
    run_step(scheduler, num_requests)
    new_blocks: list[int] = []
    for _ in range(num_steps):
        step = scheduler.schedule()
        new_blocks.append(len(step.plan.new_blocks.rows))
        scheduler.complete(step, StepResults(np.full(num_requests, 7, np.int32), ()))
    # The last token is not computed yet, so it needs no cache slot.
    unneeded_blocks = [
        len(request.block_ids) - -(-(request.num_tokens - 1) // BLOCK_SIZE) for request in scheduler.running_requests
    ]
    return new_blocks, unneeded_blocks


def test_all_requests_get_blocks_in_one_step_if_many_blocks_are_free():
    new_blocks, unneeded_blocks = count_new_blocks(1000, 2 * BLOCK_SIZE + 1)
    assert new_blocks == [BLOCK_SIZE, *[0] * (BLOCK_SIZE - 1)] * 2 + [BLOCK_SIZE]
    assert max(unneeded_blocks) == 1


def test_scarce_blocks_go_only_to_requests_that_need_one_now():
    new_blocks, unneeded_blocks = count_new_blocks(6 * BLOCK_SIZE, 3 * BLOCK_SIZE)
    assert new_blocks == [1] * 3 * BLOCK_SIZE
    assert max(unneeded_blocks) == 0


def test_no_request_gets_a_block_beyond_its_maximum_length():
    scheduler = make_scheduler(1000, 2, 1024)
    for key, (length, max_tokens) in enumerate(((16, 10), (20, 13))):
        request = Request(f"r{key}", [2] * length, SamplingParams(ignore_eos=True, max_tokens=max_tokens))
        scheduler.add(RequestState(key, request))
    run_step(scheduler, 2)
    run_step(scheduler, 2)
    assert [len(request.block_ids) for request in scheduler.running_requests] == [2, 2]


def test_consecutive_decode_steps_of_the_same_requests_share_their_rows():
    scheduler = make_decoding_scheduler(2, prefix_caching=False)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.plan.scheduled is second.plan.scheduled
    results = StepResults(np.array([7, 8], np.int32), ())
    scheduler.complete(first, results)
    scheduler.abort(1)
    # After this step, the row and the key of the aborted request are free.
    assert scheduler.complete(second, results).keys == [0]
    newcomer = RequestState(1, Request("r1", [9], SamplingParams()))
    scheduler.add(newcomer)
    before_s = time.monotonic()
    mixed = scheduler.schedule()
    ((key, num_cached_tokens, scheduled_time),) = scheduler.complete(mixed, results).starts
    assert (key, num_cached_tokens) == (1, 0)
    assert before_s <= scheduled_time <= time.monotonic()
    third = scheduler.schedule()
    assert third.plan.scheduled.rows.tolist() == first.plan.scheduled.rows.tolist()
    assert third.plan.scheduled is not first.plan.scheduled
    assert scheduler.complete(third, results).keys == [0, 1]
    assert newcomer.token_ids().tolist() == [9, 8, 8]


def test_blocks_of_an_answer_are_registered_at_intervals_and_at_its_end():
    scheduler = make_scheduler(100, 1, 1024, prefix_caching=True)
    request = RequestState(0, Request("r", [2] * 40, SamplingParams(max_tokens=100, ignore_eos=True)))
    scheduler.add(request)
    num_committed_blocks: list[int] = []
    for _ in range(100):
        run_step(scheduler, 1)
        num_committed_blocks.append(request.num_committed_blocks)
    # The last step ends the request, which then holds no blocks.
    interval = max(COMMIT_INTERVAL_TOKENS, BLOCK_SIZE)
    expected = [max(2, computed // interval * (interval // BLOCK_SIZE)) for computed in range(40, 139)] + [0]
    assert num_committed_blocks == expected
    later_request = RequestState(1, Request("later", request.token_ids(), SamplingParams()))
    assert scheduler.caches[0].admit(later_request, keep_watermark=False) == 138 // BLOCK_SIZE * BLOCK_SIZE
