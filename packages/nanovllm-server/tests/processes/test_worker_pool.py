import asyncio
import multiprocessing
import socket

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


async def test_a_replacement_that_is_not_ready_in_time_ends_the_pool(tokenizer_backend, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "START_TIMEOUT_S", 2.0)
    # No engine listens on this endpoint, so workers wait for the engine forever.
    lifeline, engine_end = multiprocessing.Pipe(duplex=False)
    engine = EngineAddress(f"ipc://{tmp_path / 'engine'}", lifeline)
    tokenizer_backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    with engine_end, lifeline, socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = WorkerArguments(
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
        pool = WorkerPool([arguments], timeout_s=60)
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
