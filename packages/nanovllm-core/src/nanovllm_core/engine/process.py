"""Starts an engine in a process of its own."""

import asyncio
import multiprocessing
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path

from nanovllm_core.engine.private_directory import remove_private_directory
from nanovllm_core.engine.server import SpecAndConfigLoader, run_engine

_STOP_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of an engine, for `EngineClient.connect` in a child process.

    lifeline: read end of a pipe. The other end closes when the engine's process ends.
    """

    endpoint: str
    lifeline: Connection


class EngineProcess:
    """A started engine process. load_spec_and_config: picklable; the engine's process calls this function."""

    def __init__(self, load_spec_and_config: SpecAndConfigLoader):
        # Only this user may enter the directory, because a process that can write to the socket can use the engine.
        self._directory = tempfile.TemporaryDirectory(prefix="nanovllm-")
        context = multiprocessing.get_context("spawn")
        read_end, write_end = context.Pipe(duplex=False)
        self.address = EngineAddress(f"ipc://{Path(self._directory.name) / 'engine'}", read_end)
        self._process: SpawnProcess = context.Process(
            target=run_engine,
            args=(load_spec_and_config, self.address.endpoint, write_end),
            name="nanovllm-engine",
            daemon=True,
        )
        with write_end:
            self._process.start()
        # A program may exit without `close`. multiprocessing would then wait for ever: the engine ignores SIGTERM.
        Finalize(self, self._process.kill, exitpriority=0)

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    async def close(self) -> None:
        """Wait until the process ends, or kill it after a timeout. Remove its private directory."""
        event_loop = asyncio.get_running_loop()
        await event_loop.run_in_executor(None, self._process.join, _STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await event_loop.run_in_executor(None, self._process.join)
        self.address.lifeline.close()
        # Ranks end after the engine, and may create files during the removal: `cleanup` alone could fail.
        remove_private_directory(self.address.endpoint)
        self._directory.cleanup()
