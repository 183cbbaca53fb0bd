import random

import numpy as np
import pytest

from nanovllm_core.cache.manager import BlockShortage, CacheManager
from nanovllm_core.cache.prefix import PrefixHasher
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState

BLOCK_SIZE = 4
ALGORITHMS = pytest.mark.parametrize("algorithm", ["fast", "sha256"])


def hash_tokens(hasher: PrefixHasher, tokens: list[int], salt: str = "") -> list[int | bytes]:
    request = RequestState(0, Request("a", tokens, cache_salt=salt))
    hasher.extend_hashes(request)
    return request.block_hashes


@ALGORITHMS
def test_hashes_do_not_depend_on_when_tokens_became_known(algorithm):
    rng, hasher = random.Random(0), PrefixHasher(algorithm, BLOCK_SIZE)
    for _ in range(50):
        tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
        request = RequestState(0, Request("a", tokens[: rng.randrange(1, len(tokens) + 1)]))
        while request.num_tokens < len(tokens):
            hasher.extend_hashes(request)
            known = request.num_tokens
            request.output_ids += tokens[known : known + rng.randrange(1, 10)]
        hasher.extend_hashes(request)
        assert request.block_hashes == hash_tokens(hasher, tokens)
        assert len(request.block_hashes) == len(tokens) // BLOCK_SIZE


@ALGORITHMS
def test_a_hash_covers_every_token_before_its_end(algorithm):
    hasher, tokens = PrefixHasher(algorithm, BLOCK_SIZE), [*range(20)]
    whole = hash_tokens(hasher, tokens)
    assert len(set(whole)) == 5
    for index in range(20):
        other = hash_tokens(hasher, [*tokens[:index], 99, *tokens[index + 1 :]])
        num_unchanged = index // BLOCK_SIZE
        assert other[:num_unchanged] == whole[:num_unchanged]
        assert not set(other[num_unchanged:]) & set(whole)
    assert not set(hash_tokens(hasher, tokens, "salt")) & set(whole)
    assert not set(hash_tokens(PrefixHasher(algorithm, BLOCK_SIZE), tokens)) & set(whole)


@ALGORITHMS
def test_arrays_and_lists_have_the_same_hashes(algorithm):
    hasher, tokens = PrefixHasher(algorithm, BLOCK_SIZE), [0, 1, 65536, 2**31 - 1, 5, 6, 7, 8]
    assert hash_tokens(hasher, np.array(tokens, np.int32)) == hash_tokens(hasher, tokens)


def test_no_block_of_a_request_is_hashed_twice(monkeypatch):
    cache = CacheManager(8, BLOCK_SIZE, prefix_caching=True, hash_algorithm="fast", watermark=0)
    hash_blocks, hashed = cache._hasher._hash_blocks, []

    def count_hashes(parent, tokens, block_bytes):
        hashed.extend(found := hash_blocks(parent, tokens, block_bytes))
        return found

    monkeypatch.setattr(cache._hasher, "_hash_blocks", count_hashes)
    first, second = RequestState(0, Request("a", [*range(22)])), RequestState(0, Request("b", [*range(50, 72)]))
    assert cache.admit(first, keep_watermark=False) == 0
    for _ in range(3):
        assert isinstance(cache.admit(second, keep_watermark=False), BlockShortage)
    assert len(hashed) == 10
    for end in (22, 23, 24):
        first.output_ids.append(7)
        cache.commit(first, end)
    cache.release(first)
    assert cache.admit(first, keep_watermark=False) == 24
    assert len(hashed) == len(set(hashed)) == 11
