"""Tests collectives on a CPU. Each rank is a process that runs checks of `collective_checks`."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from collective_checks import check_on_cpu, fail_on_last_rank, sleep_on_all_ranks
from torch.multiprocessing.spawn import ProcessRaisedException

from nanovllm_kernels.benchmarks.ranks import run_ranks
from nanovllm_kernels.collective.policy import (
    CHUNK_UNITS,
    LARGE_CHUNK_UNITS,
    MAX_PROGRAMS,
    SLOT_BYTES,
    TWO_SHOT_MAX_BYTES,
    LaunchPolicy,
    choose_one_shot_limit,
    choose_region_bytes,
)
from nanovllm_kernels.platform import has_triton

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
    one_shot_limit = choose_one_shot_limit(size)
    policy = LaunchPolicy(size, MAX_PROGRAMS, choose_region_bytes(size), one_shot_limit)
    max_part_bytes = min(one_shot_limit // (size - 1), MAX_PROGRAMS * policy.region_bytes)
    for num_bytes in (2, 16, 4096, 4098, 100_000, max_part_bytes):
        launch = policy.choose_exchange(num_bytes)
        chunks_per_program = -(-num_bytes // (launch.num_programs * launch.chunk_units * SLOT_BYTES))
        assert 1 <= launch.num_programs <= MAX_PROGRAMS
        assert chunks_per_program * launch.chunk_units * SLOT_BYTES <= policy.region_bytes
    assert policy.choose_exchange(max_part_bytes + 1) is None
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
    policy = LaunchPolicy(4, MAX_PROGRAMS, choose_region_bytes(4), choose_one_shot_limit(4))
    assert policy.choose_two_shot(48, 2) is None
    assert policy.choose_two_shot(49, 2).part_size == 16


def test_large_tensors_have_large_chunks():
    policy = LaunchPolicy(2, 100, choose_region_bytes(2), choose_one_shot_limit(2))
    assert policy.choose_exchange(100 * CHUNK_UNITS * SLOT_BYTES).chunk_units == CHUNK_UNITS
    assert policy.choose_exchange(100 * CHUNK_UNITS * SLOT_BYTES + 1).chunk_units == LARGE_CHUNK_UNITS


def test_launches_that_norm_fit_the_buffers():
    policy = LaunchPolicy(4, 128, 64 << 10, one_shot_max_sent_bytes=3 << 20)
    assert [policy.choose_norm_rows(num_rows, 16 << 10) for num_rows in (1, 64, 65)] == [1, 64, None]
    assert policy.choose_norm_rows(1, policy.region_bytes + 1) is None


@pytest.mark.parametrize(("num_rows", "num_launches"), [(1, 1), (128, 1), (512, 1), (513, 2), (1300, 3)])
def test_two_ranks_norm_large_tensors_in_equal_launches(num_rows, num_launches):
    policy = LaunchPolicy(2, 128, 64 << 10, choose_one_shot_limit(2))
    rows_per_launch = policy.choose_norm_rows(num_rows, 16 << 10)
    assert rows_per_launch <= 4 * 128
    assert -(-num_rows // rows_per_launch) == num_launches
    assert num_launches == 1 or rows_per_launch % 128 == 0


@pytest.mark.skipif(not has_triton(), reason="triton isn't installed here")
def test_each_column_of_the_benchmark_measures_its_own_kernels(monkeypatch):
    from nanovllm_kernels.benchmarks import collectives
    from nanovllm_kernels.collective import peer_collectives
    from nanovllm_kernels.collective.peer_memory import PeerMemory

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    peers = PeerMemory(0, 2, torch.empty(2), torch.empty(MAX_PROGRAMS), MAX_PROGRAMS, choose_region_bytes(2), None)
    monkeypatch.setattr(collectives, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=group)))
    monkeypatch.setattr(peer_collectives, "open_peer_memory", lambda *_: peers)
    monkeypatch.setattr(collectives, "measure_operator", lambda method, *_: method.__self__._policy)
    figure = next(collectives.measure_operators(torch.device("cpu"), "all_reduce_norm"))
    has_kernels = {
        column: (policy.choose_exchange(4096) is not None, policy.choose_two_shot(4096, 2) is not None)
        for column, policy in figure.microseconds.items()
    }
    assert has_kernels == {"one-shot": (True, False), "two-shot": (False, True), "NCCL": (False, False)}
