import itertools

import pytest

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.state_pool import StatePool, checkpoint_positions
from nanovllm_core.request import Request
from nanovllm_core.request_state import MAX_CHECKPOINTS, RequestState
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

REQUEST_KEYS = itertools.count()


def make_manager(num_state_slots: int, max_running: int) -> CacheManager:
    states = StatePool(num_state_slots, max_running, 16)
    return CacheManager(1000, 16, prefix_caching=True, hash_algorithm="fast", watermark=0, state_pool=states)


def admit_request(cache: CacheManager, tokens: list[int]) -> tuple[RequestState, int]:
    request = RequestState(next(REQUEST_KEYS), Request("r", list(tokens)))
    num_cached = cache.admit(request, keep_watermark=False)
    assert isinstance(num_cached, int)
    return request, num_cached


def finish_request(cache: CacheManager, request: RequestState) -> None:
    cache.commit(request, request.num_tokens)
    cache.release(request)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 2100, 8192, 100_000, 262_144])
def test_every_position_of_a_prompt_has_a_checkpoint_near(length):
    positions = checkpoint_positions(0, length, 0)
    assert len(positions) <= min(MAX_CHECKPOINTS, max(length.bit_length() - 4, 0))
    assert all(0 < position <= length and position % CHECKPOINT_INTERVAL == 0 for position in positions)
    for shared in range(0, length + 1, max(length // 500, 1)):
        last = max((position for position in positions if position <= shared), default=0)
        assert shared - last <= length - shared + CHECKPOINT_INTERVAL


def test_prompt_leaves_a_checkpoint_where_it_differs_from_earlier_prompts():
    assert checkpoint_positions(0, 10_000, 1000)[0] == 960
    assert 960 not in checkpoint_positions(0, 10_000, 0)
    assert min(checkpoint_positions(960, 10_000, 1000)) > 960


def test_checkpoint_is_found_only_after_the_same_tokens_in_cached_blocks():
    cache = make_manager(20, 4)
    prompt = list(range(200))
    first, num_cached = admit_request(cache, prompt)
    assert num_cached == 0
    # The step that writes the checkpoint has not ended.
    second, num_cached = admit_request(cache, prompt)
    assert num_cached == 0
    assert second.state_slot != first.state_slot
    cache.commit(first, 130)
    third, num_cached = admit_request(cache, prompt)
    assert num_cached == 128
    assert third.source_state_slot not in (0, first.state_slot, third.state_slot)
    assert admit_request(cache, [7, *prompt[1:]])[1] == 0
    for request in (second, first, third):
        finish_request(cache, request)
    assert admit_request(cache, [*prompt[:150], *range(500, 550)])[1] == 128


def test_oldest_checkpoints_are_evicted_for_running_requests():
    cache = make_manager(4, 2)
    prompts = [[start + index for index in range(100)] for start in (0, 1000, 2000)]
    for prompt in prompts:
        finish_request(cache, admit_request(cache, prompt)[0])
    assert cache.state_pool.slots.num_free == 4
    running = [admit_request(cache, prompt) for prompt in (prompts[2], [5000])]
    assert [num_cached for _, num_cached in running] == [64, 0]
    assert len({request.state_slot for request, _ in running}) == 2
    for request, _ in running:
        finish_request(cache, request)
    assert admit_request(cache, prompts[2])[1] == 64


def test_every_running_request_gets_a_slot():
    cache = make_manager(3, 2)
    for start in range(0, 5000, 500):
        pair = [admit_request(cache, [start + offset + index for index in range(70)]) for offset in (0, 200)]
        assert all(request.state_slot for request, _ in pair)
        for request, _ in pair:
            finish_request(cache, request)
    assert cache.state_pool.slots.num_free == 3


def test_request_that_ends_early_releases_its_slots():
    cache = make_manager(8, 2)
    request, _ = admit_request(cache, list(range(300)))
    assert request.checkpoints
    cache.release(request)
    assert cache.state_pool.slots.num_free == 8
    assert cache.state_pool.slots.num_cached == 0


def test_a_held_checkpoint_is_not_evicted_before_its_request_starts():
    cache = make_manager(4, 2)
    prompt, slots = list(range(200)), cache.state_pool.slots
    first, _ = admit_request(cache, prompt)
    finish_request(cache, first)
    second, num_cached = admit_request(cache, prompt)
    assert num_cached > 0
    assert cache.state_pool.hold_source(second)
    num_free = slots.num_free
    other, _ = admit_request(cache, list(range(500, 700)))
    assert other.state_slot not in (0, second.source_state_slot)
    assert second.source_state_slot not in [checkpoint.slot for checkpoint in other.checkpoints]
    finish_request(cache, other)
    assert slots.num_free == num_free
    cache.end_hold(second)
    assert slots.num_free == num_free + 1
    finish_request(cache, second)
    assert slots.num_free == slots.num_blocks


def test_a_checkpoint_is_not_held_if_other_requests_may_need_its_slot():
    cache = make_manager(4, 2)
    prompt = list(range(200))
    first, _ = admit_request(cache, prompt)
    finish_request(cache, first)
    other, _ = admit_request(cache, list(range(500, 700)))
    second, num_cached = admit_request(cache, prompt)
    assert num_cached > 0
    assert not cache.state_pool.hold_source(second)
    finish_request(cache, second)
    finish_request(cache, other)
    assert cache.state_pool.slots.num_free == cache.state_pool.slots.num_blocks
