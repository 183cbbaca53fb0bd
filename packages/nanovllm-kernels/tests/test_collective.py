"""Tests collectives on a CPU. Each rank is a process that runs checks of `collective_checks`."""

import multiprocessing

import pytest
from collective_checks import check_on_cpu, fail_on_last_rank, sleep_on_all_ranks
from torch.multiprocessing.spawn import ProcessRaisedException

from nanovllm_kernels.benchmarks.ranks import run_ranks
from nanovllm_kernels.collective.policy import (
    CHUNK_UNITS,
    LARGE_CHUNK_UNITS,
    MAX_PROGRAMS,
    ONE_SHOT_MAX_SENT_BYTES,
    SLOT_BYTES,
    TWO_SHOT_MAX_BYTES,
    LaunchPolicy,
    choose_region_bytes,
)

TIMEOUT_S = 300


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_are_correct_on_cpu_ranks(size):
    run_ranks(check_on_cpu, size, "cpu", timeout_s=TIMEOUT_S)


def test_rank_that_fails_ends_all_ranks():
    with pytest.raises(ProcessRaisedException, match="this rank fails"):
        run_ranks(fail_on_last_rank, 2, "cpu", timeout_s=TIMEOUT_S)
    assert not multiprocessing.active_children()


def test_ranks_that_hang_are_killed():
    with pytest.raises(TimeoutError, match="sleep_on_all_ranks did not end within 1 s"):
        run_ranks(sleep_on_all_ranks, 2, "cpu", timeout_s=1)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_launches_fit_the_buffers(size):
    policy = LaunchPolicy(size, MAX_PROGRAMS, choose_region_bytes(size))
    for num_bytes in (2, 16, 4096, 4098, 100_000, ONE_SHOT_MAX_SENT_BYTES // (size - 1)):
        launch = policy.choose_exchange(num_bytes)
        chunks_per_program = -(-num_bytes // (launch.num_programs * launch.chunk_units * SLOT_BYTES))
        assert 1 <= launch.num_programs <= MAX_PROGRAMS
        assert chunks_per_program * launch.chunk_units * SLOT_BYTES <= policy.region_bytes
    assert policy.choose_exchange(ONE_SHOT_MAX_SENT_BYTES // (size - 1) + 1) is None
    for element_bytes in (2, 4):
        num_elements = TWO_SHOT_MAX_BYTES // element_bytes
        for count in (num_elements, num_elements - 1, num_elements // 3):
            launch = policy.choose_two_shot(count, element_bytes)
            part_bytes = launch.part_size * element_bytes
            chunks_per_program = -(-part_bytes // (launch.num_programs * launch.chunk_units * SLOT_BYTES))
            assert chunks_per_program * launch.chunk_units * SLOT_BYTES <= policy.region_bytes // 2
            assert launch.part_size * (size - 1) < count <= launch.part_size * size
        assert policy.choose_two_shot(num_elements + 1, element_bytes) is None


def test_each_rank_has_elements_in_a_two_shot_sum():
    policy = LaunchPolicy(4, MAX_PROGRAMS, choose_region_bytes(4))
    assert policy.choose_two_shot(48, 2) is None
    assert policy.choose_two_shot(49, 2).part_size == 16


def test_large_tensors_have_large_chunks():
    policy = LaunchPolicy(2, 100, choose_region_bytes(2))
    assert policy.choose_exchange(100 * CHUNK_UNITS * SLOT_BYTES).chunk_units == CHUNK_UNITS
    assert policy.choose_exchange(100 * CHUNK_UNITS * SLOT_BYTES + 1).chunk_units == LARGE_CHUNK_UNITS


def test_number_of_norm_programs_depends_on_rows_and_bytes():
    policy = LaunchPolicy(2, MAX_PROGRAMS, choose_region_bytes(2))
    assert policy.choose_norm_programs(1, 16384) == 1
    assert policy.choose_norm_programs(64, 16384) == 64
    assert policy.choose_norm_programs(65, 16384) is None
    assert policy.choose_norm_programs(300, 1000) == MAX_PROGRAMS
    assert policy.choose_norm_programs(1, policy.region_bytes + 1) is None
