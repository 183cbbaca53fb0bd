import asyncio
import errno
import gc
import multiprocessing
import socket
from collections.abc import Iterator

import pytest

from nanovllm_core import EngineAddress
from nanovllm_server.cli import make_parser, make_settings
from nanovllm_server.observability.shared_counters import allocate_counters
from nanovllm_server.processes import worker_pool
from nanovllm_server.processes.worker_pool import MAX_BACKOFF_S, WorkerPool, compute_replacement_delay_s
from nanovllm_server.processes.worker_protocol import WorkerArguments
from nanovllm_server.protocol.request import SamplingDefaults


def test_delay_before_a_replacement_doubles_up_to_a_limit():
    delays = [0.0]
    while delays[-1] < MAX_BACKOFF_S:
        delays.append(compute_replacement_delay_s(delays[-1]))
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30]
    assert compute_replacement_delay_s(MAX_BACKOFF_S) == MAX_BACKOFF_S


@pytest.fixture
def worker_arguments(tokenizer_backend, tmp_path) -> Iterator[WorkerArguments]:
    # No engine listens on this endpoint, so workers wait for the engine forever.
    lifeline, engine_end = multiprocessing.Pipe(duplex=False)
    engine = EngineAddress(f"ipc://{tmp_path / 'engine'}", lifeline)
    tokenizer_backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    with engine_end, lifeline, socket.create_server(("127.0.0.1", 0)) as listener:
        yield WorkerArguments(
            index=0,
            settings=make_settings(make_parser().parse_args(["--log-level", "error"])),
            model=tmp_path,
            template="{{ messages }}",
            defaults=SamplingDefaults(),
            engine=engine,
            engine_pid=None,
            listener=listener,
            counters=allocate_counters(1),
            rings=None,
        )


async def test_a_replacement_that_is_not_ready_in_time_ends_the_pool(worker_arguments, monkeypatch):
    monkeypatch.setattr(worker_pool, "START_TIMEOUT_S", 2.0)
    pool = WorkerPool([worker_arguments], timeout_s=60)
    try:
        pool.open()
        (first_process,) = multiprocessing.active_children()
        first_process.kill()
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="^the replacement of HTTP worker 0 was not ready after 2 s$"):
                await pool.failed
        assert multiprocessing.active_children() == []
    finally:
        pool.kill()


async def test_a_replacement_whose_process_can_not_be_started_ends_the_pool(worker_arguments, monkeypatch):
    def refuse(_):
        raise OSError(errno.EAGAIN, "too many processes")

    pool = WorkerPool([worker_arguments], timeout_s=60)
    try:
        pool.open()
        monkeypatch.setattr(worker_pool, "WorkerProcess", refuse)
        (process,) = multiprocessing.active_children()
        process.kill()
        async with asyncio.timeout(60):
            with pytest.raises(OSError, match="too many processes"):
                await pool.failed
    finally:
        pool.kill()


async def test_a_stop_neither_waits_for_a_replacement_that_starts_nor_logs_an_error(worker_arguments):
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    pool = WorkerPool([worker_arguments], timeout_s=60)
    try:
        pool.open()
        first_worker = pool._workers[0]
        first_worker.kill()
        async with asyncio.timeout(60):
            while pool._workers[0] is first_worker:
                await asyncio.sleep(0.01)
            await pool.drain()
        assert multiprocessing.active_children() == []
    finally:
        pool.kill()
    # asyncio reports an exception that nothing has retrieved when its future is deleted.
    del pool, first_worker
    gc.collect()
    assert errors == []
