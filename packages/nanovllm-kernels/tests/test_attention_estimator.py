"""Tests estimates of attention time. The unit is one pair of a query and a key."""

import pytest

from nanovllm_kernels.attention.plan.attention_estimator import (
    PROPORTIONAL_ESTIMATOR,
    WORK_LIST_RATE,
    AttentionEstimator,
    attention_pairs,
)

ESTIMATOR = AttentionEstimator(tile_tokens=32, tiles_per_round=16)
LONG_CONTEXT_CHUNK = (32_000, 100)


def test_pairs_follow_the_causal_mask():
    assert attention_pairs(0, 4) == 1 + 2 + 3 + 4
    assert attention_pairs(10, 2) == 11 + 12


@pytest.mark.parametrize(
    ("num_tokens", "num_rounds"), [(32, 1), (100, 1), (512, 1), (513, 2), (528, 2), (1024, 2), (1025, 3)]
)
def test_chunk_takes_whole_rounds(num_tokens, num_rounds):
    pairs = ESTIMATOR.estimate_pairs([(90_000, num_tokens)])
    assert pairs == num_rounds * 512 * attention_pairs(90_000, num_tokens) // num_tokens


def test_chunks_of_one_length_share_a_round():
    one_round_pairs = ESTIMATOR.estimate_pairs([LONG_CONTEXT_CHUNK])
    assert ESTIMATOR.estimate_pairs([LONG_CONTEXT_CHUNK] * 4) == one_round_pairs
    assert (
        ESTIMATOR.estimate_pairs([LONG_CONTEXT_CHUNK] * 5)
        == ESTIMATOR.estimate_pairs([LONG_CONTEXT_CHUNK] * 8)
        == 2 * one_round_pairs
    )


def test_short_contexts_fill_incomplete_rounds_of_long_chunks():
    long_chunk = (90_000, 128)
    assert ESTIMATOR.estimate_pairs([(0, 380), long_chunk]) == ESTIMATOR.estimate_pairs([long_chunk])


def test_many_short_contexts_take_at_least_their_pairs():
    chunks = [(0, 500)] * 40
    assert ESTIMATOR.estimate_pairs(chunks) >= sum(attention_pairs(*chunk) for chunk in chunks)


def test_few_tokens_over_long_contexts_use_work_lists():
    work_list_estimator = AttentionEstimator(32, 16, work_list_limit=179, min_work_list_context=1024)
    work_list_pairs = attention_pairs(*LONG_CONTEXT_CHUNK) * 1.28 / WORK_LIST_RATE
    assert work_list_estimator.estimate_pairs([LONG_CONTEXT_CHUNK]) == pytest.approx(work_list_pairs)
    assert work_list_estimator.estimate_pairs([LONG_CONTEXT_CHUNK, LONG_CONTEXT_CHUNK]) == ESTIMATOR.estimate_pairs(
        [LONG_CONTEXT_CHUNK, LONG_CONTEXT_CHUNK]
    )
    assert work_list_estimator.estimate_pairs([(0, 100)]) == ESTIMATOR.estimate_pairs([(0, 100)])


def test_device_without_rounds_takes_the_sum_of_pairs():
    assert PROPORTIONAL_ESTIMATOR.estimate_pairs([(30_000, 128), (7, 5)]) == attention_pairs(
        30_000, 128
    ) + attention_pairs(7, 5)
    assert PROPORTIONAL_ESTIMATOR.estimate_pairs([]) == 0
