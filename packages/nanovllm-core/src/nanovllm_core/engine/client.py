"""The client of an engine in another process, with the same interface as `AsyncEngine`.

One process starts the engine and owns it; other processes that it starts may connect too.
"""

import asyncio
import logging
import multiprocessing
import os
import tempfile
import uuid
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from nanovllm_core.config import ConfigError, EngineConfig
from nanovllm_core.engine import process, wire
from nanovllm_core.engine.engine import Engine
from nanovllm_core.engine.status import EngineDeadError
from nanovllm_core.request import GrammarError, GrammarSpec, ParameterTypes, Request

if TYPE_CHECKING:
    from nanovllm_core.model import ModelSpec

# How long `close` waits before it kills the engine's process.
_STOP_SECONDS = 10
# How long the client still reads messages after the engine's process has ended.
_DRAIN_SECONDS = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of an engine. The owner may pass it to processes that it starts, for `EngineClient.connect`.

    endpoint: ZeroMQ endpoint of the engine.
    lifeline: the read end of a pipe; the other end closes when the engine's process ends for any reason.
    """

    endpoint: str
    lifeline: Connection


class EngineProcess:
    """A started engine process. `recipe` is pickled and called there; it returns the model and the configuration."""

    def __init__(self, recipe: process.Recipe):
        # Only this user may enter the directory: a process that can write to the socket can use the engine.
        self._directory = tempfile.TemporaryDirectory(prefix="nanovllm-")
        context = multiprocessing.get_context("spawn")
        lifeline, engine_end = context.Pipe(duplex=False)
        self.address = EngineAddress(f"ipc://{Path(self._directory.name) / 'engine'}", lifeline)
        self._process: SpawnProcess = context.Process(
            target=process.main, args=(recipe, self.address.endpoint, engine_end), name="nanovllm-engine", daemon=True
        )
        with engine_end:
            self._process.start()

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process now."""
        self._process.kill()

    async def close(self) -> None:
        """Wait until the process ends, kill it if that takes too long, and remove its files."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._process.join, _STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            await loop.run_in_executor(None, self._process.join)
        self.address.lifeline.close()
        self._directory.cleanup()


class EngineClient(Engine):
    """The client of an engine in another process. Create it with `launch`, or `adopt` or `connect` to a started one."""

    def __init__(self, ready: wire.Ready, socket: "EngineSocket", owned: EngineProcess | None):
        super().__init__(ready.info, ready.first_key)
        self.address = socket.address
        self._socket = socket
        self._owned = owned
        self._compiling: dict[int, asyncio.Future[ParameterTypes]] = {}
        self._receiver = asyncio.create_task(self._receive())
        self._receiver.add_done_callback(self._on_receiver_end)

    @classmethod
    async def launch(cls, spec: "ModelSpec", config: EngineConfig | None = None) -> "EngineClient":
        """Start a process and wait until its engine serves.

        Raises ConfigError for an invalid configuration, and EngineDeadError if the process fails for another reason.
        """
        return await cls.adopt(EngineProcess(partial(_spec_and_config, spec, config or EngineConfig())))

    @classmethod
    async def adopt(cls, owned: EngineProcess) -> "EngineClient":
        """Wait until a started engine serves. It now ends with this client. Raises the exceptions of `launch`."""
        try:
            return await cls._join(owned.address, owned)
        except BaseException as error:
            # A failed engine ends by itself. After a cancelled wait the engine may still load for minutes: kill it.
            if not isinstance(error, Exception):
                owned.kill()
            await owned.close()
            raise

    @classmethod
    async def connect(cls, address: EngineAddress) -> "EngineClient":
        """Connect to an engine that another process owns, and wait until it serves. Raises as `launch` does."""
        return await cls._join(address, None)

    @classmethod
    async def _join(cls, address: EngineAddress, owned: EngineProcess | None) -> "EngineClient":
        socket = EngineSocket(address)
        try:
            socket.send(wire.Hello())
            match await socket.receive():
                case wire.Ready() as ready:
                    return cls(ready, socket, owned)
                case wire.Failed(message, expected):
                    raise (ConfigError if expected else EngineDeadError)(message)
                case None:
                    raise EngineDeadError(_death_message(owned))
                case other:
                    raise EngineDeadError(f"the engine's first message was {type(other).__name__} instead of Ready")
        except BaseException:
            socket.close()
            raise

    async def compile(self, spec: GrammarSpec) -> ParameterTypes:
        """See `Engine.compile`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        key = next(self._keys)
        self._compiling[key] = answer = asyncio.get_running_loop().create_future()
        self._socket.send(wire.Compile(key, spec))
        return await answer

    async def stop(self) -> None:
        """Disconnect, and stop the engine if this client owns it. Open requests fail with EngineDeadError."""
        self._receiver.cancel()
        self._die("the engine was stopped")
        if self._owned is None:
            self._socket.close()
            return
        self._socket.send(wire.Stop())
        await self._owned.close()
        self._socket.close()

    async def _receive(self) -> None:
        while self.dead is None:
            match await self._socket.receive():
                case wire.Step(outputs, stats):
                    if stats is not None:
                        self.stats = stats
                    self._streams.dispatch(outputs)
                case wire.Compiled(key, error, parameter_types):
                    self._settle(key, parameter_types if error is None else GrammarError(*error))
                case wire.Dead(reason):
                    self._die(reason)
                case None:
                    self._die(_death_message(self._owned))
                case other:
                    self._die(f"the engine sent {type(other).__name__} while it was serving")

    def _on_receiver_end(self, receiver: "asyncio.Task[None]") -> None:
        """Fail all readers if reading messages failed, because no further output would reach them."""
        if receiver.cancelled() or (error := receiver.exception()) is None:
            return
        _log.error("engine client failed", exc_info=error)
        self._die(f"the engine's messages can't be read: {type(error).__name__}: {error}")

    def _settle(self, key: int, result: ParameterTypes | Exception) -> None:
        answer = self._compiling.pop(key)
        if answer.cancelled():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _die(self, reason: str) -> None:
        super()._die(reason)
        for key in tuple(self._compiling):
            self._settle(key, EngineDeadError(reason))

    def _submit(self, request: Request) -> None:
        self._socket.send(wire.Submit.of(request))

    def _abort(self, key: int) -> None:
        self._socket.send(wire.Abort(key))


class EngineSocket:
    """The connection to an engine: sends and receives messages, and detects the end of the engine's process."""

    def __init__(self, address: EngineAddress):
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address.endpoint)
        # A duplicate, because an event loop accepts one reader per descriptor, and the address may be closed earlier.
        self._lifeline = os.dup(address.lifeline.fileno())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._lifeline, self._on_end)
        self._next: asyncio.Future[bytes] | None = None
        self._has_ended = False

    def send(self, message: wire.ToEngine) -> None:
        """Queue a message. It is delivered once the engine has started."""
        # The high-water mark is off, so the message is queued at once. The returned future is not needed.
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.ToClient | None:
        """The next message; None once the engine's process has ended and all its messages have been read."""
        self._next = message = asyncio.ensure_future(self._socket.recv())
        if not message.done():
            if self._has_ended:
                return None
            # `wait` does not raise if `_stop_reading` cancels the future.
            await asyncio.wait((message,))
        return None if message.cancelled() else wire.decode_to_client(message.result())

    def close(self) -> None:
        """Close the connection."""
        self._loop.remove_reader(self._lifeline)
        os.close(self._lifeline)
        self._socket.close()
        self._context.term()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._lifeline)
        self._loop.call_later(_DRAIN_SECONDS, self._stop_reading)

    def _stop_reading(self) -> None:
        self._has_ended = True
        if self._next is not None:
            self._next.cancel()


def _spec_and_config(spec: "ModelSpec", config: EngineConfig) -> tuple["ModelSpec", EngineConfig]:
    """The recipe of `launch`: returns its arguments."""
    return spec, config


def _death_message(owned: EngineProcess | None) -> str:
    code = None if owned is None else owned.exit_code
    return "the engine process died" + ("" if code is None else f" (exit code {code})")
