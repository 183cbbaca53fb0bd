"""Tests the store through which ranks exchange the handles of their symmetric memory."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from nanovllm_kernels.collective.symmetric_memory import RenumberingStore


@pytest.fixture
def group_store(tmp_path) -> dist.Store:
    return dist.PrefixStore("group", dist.FileStore(str(tmp_path / "store"), 2))


def test_ranks_with_different_numbers_of_earlier_exchanges_find_each_other(group_store):
    stores = [RenumberingStore(group_store, rank) for rank in range(2)]
    for rank0_exchanges, rank1_exchanges in ((5, 0), (7, 1)):
        stores[0].set(f"CUDA/{rank0_exchanges}/0", b"\xff\x00 of rank 0")
        stores[1].set(f"CUDA/{rank1_exchanges}/1", b"\xfe\x00 of rank 1")
        stores[0].wait([f"CUDA/{rank0_exchanges}/1"])
        stores[1].wait([f"CUDA/{rank1_exchanges}/0"])
        assert stores[0].get(f"CUDA/{rank0_exchanges}/1") == b"\xfe\x00 of rank 1"
        assert stores[1].get(f"CUDA/{rank1_exchanges}/0") == b"\xff\x00 of rank 0"


def test_a_later_rendezvous_does_not_read_values_of_an_earlier_one(group_store):
    for value in (b"first", b"second"):
        stores = [RenumberingStore(group_store, rank) for rank in range(2)]
        with pytest.raises(RuntimeError, match="timeout"):
            stores[0].wait(["CUDA/0/1"], timedelta(milliseconds=50))
        stores[1].set("CUDA/0/1", value)
        assert stores[0].get("CUDA/0/1") == value


def test_other_threads_run_while_a_rank_waits(group_store):
    waiting_store, setting_store = (RenumberingStore(group_store, rank) for rank in range(2))
    timer = threading.Timer(0.2, setting_store.set, ("CUDA/0/1", b"late"))
    timer.start()
    waiting_store.wait(["CUDA/3/1"], timedelta(seconds=30))
    assert waiting_store.get("CUDA/3/1") == b"late"
    timer.join()


def test_wait_ends_with_an_error_after_the_timeout(group_store):
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match="timeout"):
        RenumberingStore(group_store, 0).wait(["CUDA/0/1"], timedelta(milliseconds=50))
    assert time.monotonic() - begin_s < 60
