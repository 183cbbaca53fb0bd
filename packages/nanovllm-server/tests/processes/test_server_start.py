import asyncio
import errno
import multiprocessing
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nanovllm_core import EngineAddress, EngineDeadError, EngineProcess
from nanovllm_models import ModelDirectory
from nanovllm_server.cli import make_parser, make_settings
from nanovllm_server.processes import server
from nanovllm_server.settings import Settings


class EngineThatDiesWhenReady:
    """Stands for the engine's process and its client."""

    death_reason = "the engine process died (exit code -9)"
    pid = None

    def __init__(self, address: EngineAddress):
        self.address = address
        self.is_stopped = False

    async def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def engine(monkeypatch, tmp_path) -> Iterator[EngineThatDiesWhenReady]:
    lifeline, engine_end = multiprocessing.Pipe(duplex=False)
    # The closed end tells workers that the engine's process has ended.
    engine_end.close()
    engine = EngineThatDiesWhenReady(EngineAddress(f"ipc://{tmp_path / 'engine'}", lifeline))

    async def adopt(process: EngineThatDiesWhenReady) -> EngineThatDiesWhenReady:
        return process

    monkeypatch.setattr(server, "EngineProcess", lambda _recipe: engine)
    monkeypatch.setattr(server, "EngineClient", SimpleNamespace(adopt=adopt))
    with lifeline:
        yield engine


@pytest.fixture
def settings(tmp_path, tokenizer_backend) -> Settings:
    tokenizer_backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    template = tmp_path / "template"
    template.write_text("{{ messages }}")
    return make_settings(make_parser().parse_args([str(tmp_path), "--port", "0", "--chat-template", str(template)]))


async def test_a_worker_that_can_not_be_started_ends_the_engine(settings, tmp_path, monkeypatch):
    def raise_error(*_arguments) -> None:
        raise OSError(errno.EAGAIN, "fork failed")

    processes: list[EngineProcess] = []

    def start_engine(recipe) -> EngineProcess:
        processes.append(EngineProcess(recipe))
        return processes[0]

    monkeypatch.setattr(server, "EngineProcess", start_engine)
    monkeypatch.setattr(server, "WorkerPool", raise_error)
    (listener,) = server.bind(settings.host, settings.port, 1)
    with listener, pytest.raises(OSError, match="fork failed"):
        await server._start_processes(settings, [listener], ModelDirectory(tmp_path, "model"), None)
    assert processes[0].exit_code == -signal.SIGKILL
    assert multiprocessing.active_children() == []


async def test_the_start_fails_if_the_engine_dies_before_a_worker_connects(engine, settings, tmp_path):
    (listener,) = server.bind(settings.host, settings.port, 1)
    with listener:
        async with asyncio.timeout(60):
            with pytest.raises(EngineDeadError, match=r"^the engine process died \(exit code -9\)$"):
                await server._start_processes(settings, [listener], ModelDirectory(tmp_path, "model"), None)
    assert engine.is_stopped
    for worker in multiprocessing.active_children():
        worker.join(60)
    assert multiprocessing.active_children() == []
