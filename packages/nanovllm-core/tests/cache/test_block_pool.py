import pytest

from nanovllm_core.cache.block_pool import NULL_BLOCK, BlockPool
from nanovllm_core.cache.manager import BlockShortage, CacheManager
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState


def manager(num_blocks: int = 8, *, prefix_hash: str = "fast", watermark: float = 0.0) -> CacheManager:
    return CacheManager(num_blocks, 4, prefix_caching=True, prefix_hash=prefix_hash, watermark=watermark)


def admitted(cache: CacheManager, name: str, tokens: list[int], salt: str = "") -> RequestState:
    request = RequestState(0, Request(name, list(tokens), cache_salt=salt))
    assert cache.admit(request, keep_watermark=False) is not None
    return request


def found(cache: CacheManager, tokens: list[int], salt: str = "") -> int | None:
    """How many tokens of a prompt need not be computed."""
    return cache.admit(RequestState(0, Request("x", list(tokens), cache_salt=salt)), keep_watermark=False)


def finish(cache: CacheManager, request: RequestState) -> None:
    cache.commit(request, request.num_tokens)
    cache.release(request)


def test_the_null_block_is_never_given_out():
    assert NULL_BLOCK not in BlockPool(5).allocate(5)


def test_a_double_free_is_an_error():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks)


def test_empty_blocks_go_before_cached_ones_and_cached_ones_oldest_first():
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
    cache = manager()
    finish(cache, admitted(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert found(cache, [9, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


@pytest.mark.parametrize("prefix_hash", ["fast", "sha256"])
def test_salts_keep_tenants_apart(prefix_hash: str):
    cache = manager(prefix_hash=prefix_hash)
    finish(cache, admitted(cache, "a", [1, 2, 3, 4, 5], "one"))
    assert found(cache, [1, 2, 3, 4, 5], "two") == 0
    assert found(cache, [1, 2, 3, 4, 5], "one") == 4


def test_blocks_of_a_step_still_in_flight_are_not_found():
    cache = manager()
    request = admitted(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.commit(request, 4)
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_failed_admission_changes_nothing():
    cache = manager(num_blocks=2, watermark=0.5)
    request = RequestState(0, Request("a", [1] * 8))
    assert cache.admit(request, keep_watermark=True) == BlockShortage(3)
    assert cache.pool.num_free == 2
    assert cache.admit(request, keep_watermark=False) == 0
    assert cache.grow([request]) is None
    assert len(request.block_ids) == 2


def test_requests_that_grow_together_get_a_block_each_or_none():
    cache = manager(num_blocks=4)
    first, second = (admitted(cache, name, [1, 2]) for name in "ab")
    assert cache.grow([first, second]) == [first.block_ids[-1], second.block_ids[-1]]
    assert len({*first.block_ids, *second.block_ids}) == 4
    cache.release(second)
    third = admitted(cache, "c", [1, 2])
    assert cache.grow([first, third]) is None
    assert (len(first.block_ids), len(third.block_ids)) == (2, 1)
    assert cache.pool.num_free == 1


def test_the_front_of_a_chain_outlives_its_end():
    cache = manager(num_blocks=3)
    finish(cache, admitted(cache, "a", list(range(12))))
    finish(cache, admitted(cache, "b", [99, 98, 97]))
    assert found(cache, list(range(12))) == 8
