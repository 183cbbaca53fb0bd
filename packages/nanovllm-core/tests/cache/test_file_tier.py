from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nanovllm_core.cache.file_tier import NUM_THREADS, FileRead, FileTier
from nanovllm_core.cache.host_memory import EntryKind, HostLayout


@pytest.fixture
def files():
    files = FileTier([], SimpleNamespace(layout=HostLayout(1, 1, (1 << 20, 1 << 23), (8, 8))))
    yield files
    files.close()


def end_read(files: FileTier, kind: EntryKind, seconds: float) -> None:
    future: Future[float | None] = Future()
    future.set_result(seconds)
    assert files.end_read(FileRead(kind, bytes(32), 1, future))


def test_threads_share_the_predicted_time_of_reads_but_not_that_of_one_entry(files):
    for num_blocks in (1, 1000):
        assert files.predict_read([EntryKind.BLOCK] * num_blocks) == 0
    for _ in range(5):
        end_read(files, EntryKind.BLOCK, 0.5)
    assert files.predict_read([EntryKind.BLOCK]) == pytest.approx(0.5)
    assert files.predict_read([EntryKind.BLOCK] * 1000) == pytest.approx(1000 * 0.5 / NUM_THREADS)
    end_read(files, EntryKind.CHECKPOINT, 2.0)
    predicted_s = files.predict_read([EntryKind.BLOCK] * 1000 + [EntryKind.CHECKPOINT])
    assert predicted_s == pytest.approx((1000 * 0.5 + 2.0) / NUM_THREADS)
