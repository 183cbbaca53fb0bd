"""The engine in its own process, seen from here: the same face as `AsyncEngine`, with a socket in between.

This room must not know how the engine works; it starts the process, and notices when it is gone.
"""

import asyncio
import contextlib
import multiprocessing
import tempfile
import uuid
from multiprocessing.context import SpawnProcess
from pathlib import Path

import zmq
import zmq.asyncio

from nanovllm_core.config import ConfigError, EngineConfig
from nanovllm_core.engine import process, wire
from nanovllm_core.engine.engine import Engine
from nanovllm_core.engine.status import EngineDeadError, EngineInfo
from nanovllm_core.model import ModelSpec
from nanovllm_core.request import Request

_STOP_SECONDS = 10


class EngineClient(Engine):
    """An engine in a process of its own. Make it with `launch`."""

    def __init__(self, info: EngineInfo, connection: "Connection"):
        super().__init__(info)
        self._connection = connection
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def launch(cls, spec: ModelSpec, config: EngineConfig | None = None) -> "EngineClient":
        """Start the process and wait until its engine serves.

        Raises ConfigError when what was asked for can't be, and EngineDeadError when the process fails otherwise.
        """
        connection = Connection(spec, config or EngineConfig())
        try:
            connection.send(wire.Hello())
            match await connection.receive():
                case wire.Ready(info):
                    return cls(info, connection)
                case wire.Failed(message, expected):
                    raise (ConfigError if expected else EngineDeadError)(message)
                case other:
                    raise EngineDeadError(f"the engine began with {type(other).__name__}, not with Ready")
        except BaseException:
            await connection.close()
            raise

    async def stop(self) -> None:
        """End the engine and its process; requests still running get an EngineDeadError."""
        self._receiver.cancel()
        self._die("the engine was stopped")
        self._connection.send(wire.Stop())
        await self._connection.close()

    async def _receive(self) -> None:
        try:
            while True:
                match await self._connection.receive():
                    case wire.Step(outputs, stats):
                        self.stats = stats
                        self._streams.dispatch(outputs)
                    case wire.Dead(reason):
                        self._die(reason)
                    case other:
                        self._die(f"the engine sent {type(other).__name__} while it was serving")
        except EngineDeadError as error:
            self._die(str(error))

    def _submit(self, request: Request) -> None:
        self._connection.send(wire.Submit.of(request))

    def _abort(self, key: str) -> None:
        self._connection.send(wire.Abort(key))


class Connection:
    """A started engine process and the socket to it."""

    def __init__(self, spec: ModelSpec, config: EngineConfig):
        # A directory that only this user may enter: whoever can write to the socket can use the engine.
        self._directory = tempfile.TemporaryDirectory(prefix="nanovllm-")
        address = f"ipc://{Path(self._directory.name) / 'engine'}"
        context = multiprocessing.get_context("spawn")
        self._process: SpawnProcess = context.Process(
            target=process.main, args=(spec, config, address), name="nanovllm-engine", daemon=True
        )
        self._process.start()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_exit)

    def send(self, message: wire.ToEngine) -> None:
        """Queue a message; it goes out even if the engine is still starting."""
        # The high-water mark is off, so this queues at once; the future only reports that.
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.ToClient:
        """The next message. Raises EngineDeadError once the process is gone and all that it sent has been read."""
        message = asyncio.ensure_future(self._socket.recv())
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((message, gone), return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return wire.decode_to_client(message.result())
            with contextlib.suppress(asyncio.TimeoutError):
                return wire.decode_to_client(await asyncio.wait_for(message, 0.1))
            raise EngineDeadError(f"the engine process died (exit code {self._process.exitcode})")
        finally:
            message.cancel()
            gone.cancel()

    async def close(self) -> None:
        """See the process end, by force if it must be, and clean up after it."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._process.join, _STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            await loop.run_in_executor(None, self._process.join)
        loop.remove_reader(self._process.sentinel)
        self._socket.close()
        self._context.term()
        self._directory.cleanup()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._gone.set()
