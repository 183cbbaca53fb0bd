from collections import Counter

from nanovllm_core.cache.block_pool import BlockPool
from nanovllm_core.cache.host_memory import Direction, EntryKind, HostLayout
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState

BLOCK_HASH = b"hash"


class CountingHost:
    """Host memory without data. done: number of ended batches by direction."""

    def __init__(self):
        self.layout = HostLayout(num_ranks=1, num_parts=1, entry_bytes=(1,), num_slots=(4,))
        self.is_ready, self.num_failures = True, 0
        self.done = Counter[Direction]()

    def num_done(self, direction: Direction) -> int:
        return self.done[direction]


def test_a_load_is_in_flight_although_another_load_of_the_same_block_has_ended():
    host, cache_pool = CountingHost(), BlockPool(4)
    tier = HostTier(host, 16, lambda *_: 1e9)
    group = tier.attach([cache_pool])
    (stored_block,) = cache_pool.allocate(1)
    cache_pool.register(stored_block, BLOCK_HASH)
    tier.queue_store(group, EntryKind.BLOCK, BLOCK_HASH)
    tier.take_stores()
    host.done[Direction.STORE] += 1
    tier.collect_ended_loads()
    cache_pool.forget_hashes()
    for key in range(2):
        request = RequestState(key, Request(f"r{key}", [5] * 17), block_ids=cache_pool.allocate(1))
        assert tier.start_load(request, group, [BLOCK_HASH]) is not None
        tier.take_loads()
    for num_left in (1, 0):
        host.done[Direction.LOAD] += 1
        assert len(tier.collect_ended_loads()) == 1
        assert tier.has_loads(group) is bool(num_left)
