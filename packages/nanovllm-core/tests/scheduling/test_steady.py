"""In steady decode a step's work in Python does not grow with the number of requests."""

import numpy as np
import pytest
from counting import calls

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request, SamplingParams
from nanovllm_core.scheduling.plan import StepTokens
from nanovllm_core.scheduling.scheduler import Scheduler

BLOCK_SIZE, LONGEST, EOS = 16, 256, 1


def decoding(count: int, *, prefix_caching: bool) -> Scheduler:
    """A scheduler of `count` requests, each with its first token made and a block that holds the next ten."""
    cache = CacheManager(4 * count, BLOCK_SIZE, prefix_caching=prefix_caching, prefix_hash="fast", watermark=0)
    scheduler = Scheduler(
        cache, max_num_seqs=count, max_num_batched_tokens=64 * count, max_model_len=LONGEST, eos_token_ids=[EOS]
    )
    for key in range(count):
        request = Request(f"r{key}", [2 + key] * 36, SamplingParams(stop_token_ids=(0,)))
        request.key = key
        scheduler.add(request)
    step(scheduler, count)
    return scheduler


def step(scheduler: Scheduler, count: int) -> None:
    plan = scheduler.schedule()
    outputs = scheduler.complete(plan, StepTokens(np.full(count, 7, np.int32), ()))
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
        # But one: the token is appended to the request's.
        assert at_many["c_call"] - at_few["c_call"] <= many - few


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
