import pytest

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.state_pool import StatePool, checkpoint_positions
from nanovllm_core.request import Request
from nanovllm_core.request_state import MAX_CHECKPOINTS, RequestState
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL


def manager(num_slots: int, max_running: int) -> CacheManager:
    states = StatePool(num_slots, max_running, 16)
    return CacheManager(1000, 16, prefix_caching=True, prefix_hash="fast", watermark=0, states=states)


def admitted(cache: CacheManager, tokens: list[int]) -> tuple[RequestState, int]:
    request = RequestState(0, Request("r", list(tokens)))
    computed = cache.admit(request, keep_watermark=False)
    assert computed is not None
    return request, computed


def finish(cache: CacheManager, request: RequestState) -> None:
    cache.commit(request, request.num_tokens)
    cache.release(request)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 2100, 8192, 100_000, 262_144])
def test_wherever_a_prompt_is_left_a_checkpoint_is_near(length):
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


def test_a_checkpoint_is_found_only_along_the_same_tokens_and_with_all_blocks_there():
    cache = manager(20, 4)
    prompt = list(range(200))
    first, computed = admitted(cache, prompt)
    assert computed == 0
    # Nothing is found before the step that makes it has ended.
    second, computed = admitted(cache, prompt)
    assert computed == 0
    assert second.state_slot != first.state_slot
    cache.commit(first, 130)
    third, computed = admitted(cache, prompt)
    assert computed == 128
    assert third.source_state_slot not in (0, first.state_slot, third.state_slot)
    assert admitted(cache, [7, *prompt[1:]])[1] == 0
    for request in (second, first, third):
        finish(cache, request)
    assert admitted(cache, [*prompt[:150], *range(500, 550)])[1] == 128


def test_checkpoints_make_room_for_requests_and_the_last_used_stay():
    cache = manager(4, 2)
    prompts = [[start + index for index in range(100)] for start in (0, 1000, 2000)]
    for prompt in prompts:
        finish(cache, admitted(cache, prompt)[0])
    assert cache.states.slots.num_free == 4
    running = [admitted(cache, prompt) for prompt in (prompts[2], [5000])]
    assert [computed for _, computed in running] == [64, 0]
    assert len({request.state_slot for request, _ in running}) == 2
    for request, _ in running:
        finish(cache, request)
    assert admitted(cache, prompts[2])[1] == 64


def test_with_every_row_taken_there_was_a_slot_for_each():
    cache = manager(3, 2)
    for start in range(0, 5000, 500):
        pair = [admitted(cache, [start + offset + index for index in range(70)]) for offset in (0, 200)]
        assert all(request.state_slot for request, _ in pair)
        for request, _ in pair:
            finish(cache, request)
    assert cache.states.slots.num_free == 3


def test_a_request_that_ends_early_leaves_nothing_behind():
    cache = manager(8, 2)
    request, _ = admitted(cache, list(range(300)))
    assert request.checkpoints
    cache.release(request)
    assert cache.states.slots.num_free == 8
    assert cache.states.slots.num_cached == 0
