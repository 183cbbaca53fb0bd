"""Who decodes waits for few prompts at a time; where more wait than decode, a step takes all that it may."""

import numpy as np
import pytest

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request, SamplingParams
from nanovllm_core.scheduling.plan import StepTokens
from nanovllm_core.scheduling.policy import MIXED_TOKENS
from nanovllm_core.scheduling.scheduler import Scheduler

BUDGET, LONG, BLOCK_SIZE = 8192, 5000, 16


def make_scheduler(max_num_seqs: int, *, prefix_caching: bool = False) -> Scheduler:
    cache = CacheManager(4000, BLOCK_SIZE, prefix_caching=prefix_caching, prefix_hash="fast", watermark=0)
    return Scheduler(
        cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=BUDGET, max_model_len=8192, eos_token_ids=[1]
    )


def add(scheduler: Scheduler, key: int, num_tokens: int, token: int = 2) -> None:
    request = Request(f"r{key}", [token] * num_tokens, SamplingParams(ignore_eos=True))
    request.key = key
    scheduler.add(request)


def step(scheduler: Scheduler) -> list[int]:
    """One step; returns how many tokens each of its requests computed."""
    planned = scheduler.schedule()
    scheduled = planned.plan.scheduled
    scheduler.complete(planned, StepTokens(np.full(scheduled.samples.sum(), 7, np.int32), ()))
    return scheduled.num_tokens.tolist()


def test_prompts_alone_take_the_whole_budget():
    scheduler = make_scheduler(16)
    add(scheduler, 0, LONG)
    add(scheduler, 1, 3000)
    assert step(scheduler) == [LONG, 3000]


def test_prompts_beside_decodes_are_cut():
    scheduler = make_scheduler(16)
    add(scheduler, 0, 10)
    step(scheduler)
    add(scheduler, 1, LONG)
    chunks = [step(scheduler) for _ in range(3)]
    assert [chunk[0] for chunk in chunks] == [1, 1, 1]
    assert sum(chunk[1] for chunk in chunks) == LONG
    assert all(MIXED_TOKENS - BLOCK_SIZE < sum(chunk) <= MIXED_TOKENS for chunk in chunks[:2])


def test_prompts_of_more_than_decode_take_the_whole_budget():
    scheduler = make_scheduler(16)
    for key in range(2):
        add(scheduler, key, 10)
    step(scheduler)
    for key in range(2, 6):
        add(scheduler, key, LONG)
    # Four wait for two: the first of them and a part of the second. Three for three: the rest of that, the third and a
    # part of the fourth. One for five.
    chunks = [step(scheduler) for _ in range(3)]
    assert all(BUDGET - BLOCK_SIZE < sum(chunk) <= BUDGET for chunk in chunks[:2])
    assert [chunk.count(1) for chunk in chunks] == [2, 3, 5]
    assert MIXED_TOKENS - BLOCK_SIZE < sum(chunks[2]) <= MIXED_TOKENS


def test_fewer_prompts_than_decode_are_cut():
    scheduler = make_scheduler(16)
    for key in range(3):
        add(scheduler, key, 10)
    step(scheduler)
    for key in range(3, 5):
        add(scheduler, key, LONG)
    assert MIXED_TOKENS - BLOCK_SIZE < sum(step(scheduler)) <= MIXED_TOKENS


@pytest.mark.parametrize("at_first", [256, 128])
def test_a_burst_begins_in_as_few_steps_as_its_tokens_need(at_first):
    scheduler = make_scheduler(256)
    for key in range(at_first):
        add(scheduler, key, 64)
    chunks = [step(scheduler)]
    for key in range(at_first, 256):
        add(scheduler, key, 64)
    chunks += [step(scheduler) for _ in range(3)]
    assert chunks == [[64] * 128, [1] * 128 + [64] * 126, [1] * 254 + [64] * 2, [1] * 256]


def test_a_burst_ends_where_twice_as_many_decode():
    scheduler = make_scheduler(64)
    for key in range(3):
        add(scheduler, key, 10)
    step(scheduler)
    for key in range(3, 7):
        add(scheduler, key, LONG)
    chunks = [step(scheduler)]
    # However many keep coming: one after each step.
    for key in range(7, 17):
        add(scheduler, key, LONG)
        chunks.append(step(scheduler))
    assert sum(chunks[0]) > MIXED_TOKENS
    assert sum(chunks[-1]) <= MIXED_TOKENS
    assert all(chunk[:3] == [1, 1, 1] for chunk in chunks)


def test_whom_there_is_no_row_for_does_not_count():
    scheduler = make_scheduler(2)
    add(scheduler, 0, 10)
    step(scheduler)
    for key in range(1, 5):
        add(scheduler, key, LONG)
    assert sum(step(scheduler)) <= MIXED_TOKENS


def test_prompts_are_served_however_many_decode():
    count = MIXED_TOKENS + 100
    scheduler = make_scheduler(count + 1)
    for key in range(count):
        add(scheduler, key, 2)
    step(scheduler)
    add(scheduler, count, 40)
    assert step(scheduler) == [1] * count + [BLOCK_SIZE]


def test_prompts_of_which_nothing_is_there_come_last():
    scheduler = make_scheduler(16, prefix_caching=True)
    add(scheduler, 0, 3 * BLOCK_SIZE)
    step(scheduler)
    add(scheduler, 1, 100, token=3)
    add(scheduler, 2, 3 * BLOCK_SIZE + 9)
    add(scheduler, 3, 1, token=4)
    assert step(scheduler) == [1, 1, 9, 100]
