"""The Python work of a steady decode step does not grow with the number of requests."""

import numpy as np
import pytest
from counting import calls

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.plan import StepResults
from nanovllm_core.scheduling.result_applier import COMMIT_INTERVAL_TOKENS
from nanovllm_core.scheduling.scheduler import Scheduler

BLOCK_SIZE, LONGEST, EOS = 16, 256, 1


def decoding(count: int, *, prefix_caching: bool) -> Scheduler:
    """A scheduler of `count` requests, each with its first token made and a block that holds the next ten."""
    cache = CacheManager(4 * count, BLOCK_SIZE, prefix_caching=prefix_caching, prefix_hash="fast", watermark=0)
    scheduler = Scheduler(
        cache, max_num_seqs=count, limits=StepLimits(64 * count), max_model_len=LONGEST, eos_token_ids=[EOS]
    )
    for key in range(count):
        request = Request(f"r{key}", [2 + key] * 36, SamplingParams(stop_token_ids=(0,)))
        scheduler.add(RequestState(key, request))
    step(scheduler, count)
    return scheduler


def step(scheduler: Scheduler, count: int) -> None:
    plan = scheduler.schedule()
    outputs = scheduler.complete(plan, StepResults(np.full(count, 7, np.int32), ()))
    assert outputs.tokens == [7] * count
    assert sorted(outputs.keys) == list(range(count))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_no_function_is_called_for_each_request(prefix_caching: bool):
    few, many = 8, 256
    counts = {}
    for count in (few, many):
        scheduler = decoding(count, prefix_caching=prefix_caching)
        counts[count] = [calls(step, scheduler, count) for _ in range(8)]
    for at_few, at_many in zip(counts[few], counts[many], strict=True):
        assert at_few["call"] == at_many["call"] < 100
        assert at_few["c_call"] == at_many["c_call"]


def test_blocks_for_all_cost_two_calls_a_request():
    few, many = 8, 256
    grown = {}
    for count in (few, many):
        scheduler = decoding(count, prefix_caching=False)
        grown[count] = [calls(step, scheduler, count)["call"] for _ in range(BLOCK_SIZE)]
    per_request = [(at_many - at_few) / (many - few) for at_few, at_many in zip(grown[few], grown[many], strict=True)]
    # One step of all lets the tables grow.
    assert sum(extra > 0 for extra in per_request) == 1
    assert max(per_request) <= 2


def held_by_need(num_blocks: int, num_steps: int) -> tuple[list[int], list[int]]:
    """Of decodes whose blocks are full at different times: how many get a block in each of `num_steps` steps, and how
    many more each holds at the end than its tokens need.
    """
    count = BLOCK_SIZE
    cache = CacheManager(num_blocks, BLOCK_SIZE, prefix_caching=False, prefix_hash="fast", watermark=0)
    scheduler = Scheduler(
        cache, max_num_seqs=count, limits=StepLimits(1024), max_model_len=LONGEST, eos_token_ids=[EOS]
    )
    requests = [Request(f"r{key}", [2] * (33 + key), SamplingParams(ignore_eos=True)) for key in range(count)]
    for key, request in enumerate(requests):
        scheduler.add(RequestState(key, request))
    step(scheduler, count)
    grown: list[int] = []
    for _ in range(num_steps):
        planned = scheduler.schedule()
        grown.append(len(planned.plan.new_blocks.rows))
        scheduler.complete(planned, StepResults(np.full(count, 7, np.int32), ()))
    # The last token has been made, but not computed.
    return grown, [
        len(request.block_ids) - -(-(request.num_tokens - 1) // BLOCK_SIZE) for request in scheduler.running_requests
    ]


def test_plenty_of_blocks_are_given_to_all_in_one_step():
    grown, ahead = held_by_need(1000, 2 * BLOCK_SIZE + 1)
    assert grown == [BLOCK_SIZE, *[0] * (BLOCK_SIZE - 1)] * 2 + [BLOCK_SIZE]
    assert max(ahead) == 1


def test_scarce_blocks_go_only_to_requests_that_need_one_now():
    # Three for each prompt, and three more: less than four for each that will need one.
    grown, ahead = held_by_need(6 * BLOCK_SIZE, 3 * BLOCK_SIZE)
    assert grown == [1] * 3 * BLOCK_SIZE
    assert max(ahead) == 0


def test_no_request_gets_a_block_beyond_its_maximum_length():
    cache = CacheManager(1000, BLOCK_SIZE, prefix_caching=False, prefix_hash="fast", watermark=0)
    scheduler = Scheduler(cache, max_num_seqs=2, limits=StepLimits(1024), max_model_len=LONGEST, eos_token_ids=[EOS])
    # The first needs a block at once, the other's is enough for all of its answer.
    for key, (length, max_tokens) in enumerate(((16, 10), (20, 13))):
        request = Request(f"r{key}", [2] * length, SamplingParams(ignore_eos=True, max_tokens=max_tokens))
        scheduler.add(RequestState(key, request))
    step(scheduler, 2)
    step(scheduler, 2)
    assert [len(request.block_ids) for request in scheduler.running_requests] == [2, 2]


def test_steps_of_the_same_requests_are_scheduled_alike():
    scheduler = decoding(2, prefix_caching=False)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.plan.scheduled is second.plan.scheduled
    tokens = StepResults(np.array([7, 8], np.int32), ())
    scheduler.complete(first, tokens)
    scheduler.abort(1)
    # Its key is free, and so is its row, once the step in flight has ended.
    assert scheduler.complete(second, tokens).keys == [0]
    newcomer = RequestState(1, Request("r1", [9], SamplingParams()))
    scheduler.add(newcomer)
    mixed = scheduler.schedule()
    assert scheduler.complete(mixed, tokens).starts == [(1, 0)]
    third = scheduler.schedule()
    assert third.plan.scheduled.rows.tolist() == first.plan.scheduled.rows.tolist()
    assert third.plan.scheduled is not first.plan.scheduled
    assert scheduler.complete(third, tokens).keys == [0, 1]
    assert newcomer.token_ids().tolist() == [9, 8, 8]


def test_blocks_of_an_answer_are_found_some_at_a_time_and_at_its_end_all():
    cache = CacheManager(100, BLOCK_SIZE, prefix_caching=True, prefix_hash="fast", watermark=0)
    scheduler = Scheduler(cache, max_num_seqs=1, limits=StepLimits(1024), max_model_len=LONGEST, eos_token_ids=[EOS])
    request = RequestState(0, Request("r", [2] * 40, SamplingParams(max_tokens=100, ignore_eos=True)))
    scheduler.add(request)
    committed: list[int] = []
    for _ in range(100):
        step(scheduler, 1)
        committed.append(request.num_committed_blocks)
    # By the tokens that are computed: 40 to 138. What a request holds no more is not counted as its own.
    some = max(COMMIT_INTERVAL_TOKENS, BLOCK_SIZE)
    assert committed == [max(2, computed // some * (some // BLOCK_SIZE)) for computed in range(40, 139)] + [0]
    again = RequestState(1, Request("again", request.token_ids(), SamplingParams()))
    assert cache.admit(again, keep_watermark=False) == 138 // BLOCK_SIZE * BLOCK_SIZE
