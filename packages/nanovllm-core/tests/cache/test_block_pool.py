import pytest

from nanovllm_core.cache.block_pool import NULL_BLOCK, BlockPool
from nanovllm_core.cache.manager import BlockShortage, CacheManager
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState


def make_manager(num_blocks: int = 8, *, hash_algorithm: str = "fast", watermark: float = 0.0) -> CacheManager:
    return CacheManager(num_blocks, 4, prefix_caching=True, hash_algorithm=hash_algorithm, watermark=watermark)


def admit_request(cache: CacheManager, name: str, tokens: list[int], salt: str = "") -> RequestState:
    request = RequestState(0, Request(name, list(tokens), cache_salt=salt))
    assert isinstance(cache.admit(request, keep_watermark=False), int)
    return request


def count_cached_tokens(cache: CacheManager, tokens: list[int], salt: str = "") -> int:
    num_cached = cache.admit(RequestState(0, Request("x", list(tokens), cache_salt=salt)), keep_watermark=False)
    assert isinstance(num_cached, int)
    return num_cached


def finish_request(cache: CacheManager, request: RequestState) -> None:
    cache.commit(request, request.num_tokens)
    cache.release(request)


def test_null_block_is_never_allocated():
    assert NULL_BLOCK not in BlockPool(5).allocate(5)


def test_releasing_a_block_twice_is_an_error():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks)


def test_empty_blocks_are_allocated_first_and_then_the_oldest_cached_blocks():
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    pool.register(a, 1)
    pool.register(b, 2)
    pool.release([a])
    pool.release([b])
    pool.release([c])
    pool.release([d])
    assert pool.num_cached == 2
    assert set(pool.allocate(2)) == {c, d}
    assert pool.allocate(1) == [a]
    assert pool.lookup(1) is None
    assert pool.lookup(2) == b


def test_a_block_in_use_is_shared_and_freed_by_its_last_holder():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_a_prompt_finds_full_blocks_but_always_computes_its_last_token():
    cache = make_manager()
    finish_request(cache, admit_request(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert count_cached_tokens(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert count_cached_tokens(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert count_cached_tokens(cache, [9, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


@pytest.mark.parametrize("hash_algorithm", ["fast", "sha256"])
def test_prompts_with_different_salts_share_no_blocks(hash_algorithm: str):
    cache = make_manager(hash_algorithm=hash_algorithm)
    finish_request(cache, admit_request(cache, "a", [1, 2, 3, 4, 5], "one"))
    assert count_cached_tokens(cache, [1, 2, 3, 4, 5], "two") == 0
    assert count_cached_tokens(cache, [1, 2, 3, 4, 5], "one") == 4


def test_blocks_of_a_step_still_in_flight_are_not_found():
    cache = make_manager()
    request = admit_request(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.commit(request, 4)
    assert count_cached_tokens(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_failed_admission_changes_nothing():
    cache = make_manager(num_blocks=2, watermark=0.5)
    request = RequestState(0, Request("a", [1] * 8))
    assert cache.admit(request, keep_watermark=True) == BlockShortage(3)
    assert cache.pool.num_free == 2
    assert cache.admit(request, keep_watermark=False) == 0
    assert cache.grow([request]) is None
    assert len(request.block_ids) == 2


def test_either_all_requests_get_one_more_block_or_no_request():
    cache = make_manager(num_blocks=4)
    first, second = (admit_request(cache, name, [1, 2]) for name in "ab")
    assert cache.grow([first, second]) == [first.block_ids[-1], second.block_ids[-1]]
    assert len({*first.block_ids, *second.block_ids}) == 4
    cache.release(second)
    third = admit_request(cache, "c", [1, 2])
    assert cache.grow([first, third]) is None
    assert (len(first.block_ids), len(third.block_ids)) == (2, 1)
    assert cache.pool.num_free == 1


def test_last_blocks_of_a_prompt_are_evicted_first():
    cache = make_manager(num_blocks=3)
    finish_request(cache, admit_request(cache, "a", list(range(12))))
    finish_request(cache, admit_request(cache, "b", [99, 98, 97]))
    assert count_cached_tokens(cache, list(range(12))) == 8


def test_touched_block_is_evicted_last():
    pool = BlockPool(2)
    for block in (first := pool.allocate(2)):
        pool.register(block, block)
    pool.release(first)
    pool.touch(first[0])
    assert pool.allocate(1) == [first[1]]
    pool.touch(first[1])  # A block in use stays in use.
    assert pool.allocate(1) == [first[0]]


def test_forgotten_blocks_are_empty_or_stay_in_use():
    pool = BlockPool(3)
    cached, used = pool.allocate(2)
    for block in (cached, used):
        pool.register(block, block)
    pool.release([cached])
    pool.forget_hashes()
    assert (pool.num_cached, pool.num_free) == (0, 2)
    assert pool.lookup(cached) is pool.lookup(used) is None
    pool.release([used])
    assert (pool.num_cached, pool.num_free) == (0, 3)
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_holding_a_block_leaves_the_reserved_blocks_free():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, 1)
    assert pool.can_acquire(block)
    pool.release([block])
    pool.num_reserved = 1
    assert pool.can_acquire(block)
    pool.num_reserved = 2
    assert not pool.can_acquire(block)
