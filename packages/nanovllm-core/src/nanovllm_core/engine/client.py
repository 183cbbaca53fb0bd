"""The engine in its own process, seen from here: the same face as `AsyncEngine`, with a socket in between.

One process starts the engine and owns it; others, started by that one, may join. This room must not know how the engine
works; it notices when it is gone.
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
from nanovllm_core.request import GrammarError, GrammarSpec, Request

if TYPE_CHECKING:
    from nanovllm_core.model import ModelSpec

_STOP_SECONDS = 10
# For what the engine said just before it ended.
_LAST_WORDS_SECONDS = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is; an argument for processes that its owner starts, which may join it with this.

    lifeline: a pipe whose other end only the engine's process has, and so ends with it, however that comes.
    """

    endpoint: str
    lifeline: Connection


class EngineProcess:
    """A started engine. `recipe` runs in its process and gives model and configuration; it travels there by pickle."""

    def __init__(self, recipe: process.Recipe):
        # A directory that only this user may enter: whoever can write to the socket can use the engine.
        self._directory = tempfile.TemporaryDirectory(prefix="nanovllm-")
        context = multiprocessing.get_context("spawn")
        lifeline, theirs = context.Pipe(duplex=False)
        self.address = EngineAddress(f"ipc://{Path(self._directory.name) / 'engine'}", lifeline)
        self._process: SpawnProcess = context.Process(
            target=process.main, args=(recipe, self.address.endpoint, theirs), name="nanovllm-engine", daemon=True
        )
        with theirs:
            self._process.start()

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """End the process now, whatever it is at."""
        self._process.kill()

    async def close(self) -> None:
        """See the process end, by force if it must be, and clean up after it."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._process.join, _STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            await loop.run_in_executor(None, self._process.join)
        self.address.lifeline.close()
        self._directory.cleanup()


class EngineClient(Engine):
    """An engine in a process of its own. Make it with `launch`, or `adopt` or `connect` where one has been started."""

    def __init__(self, ready: wire.Ready, socket: "EngineSocket", owned: EngineProcess | None):
        super().__init__(ready.info, ready.first_key)
        self.address = socket.address
        self._socket = socket
        self._owned = owned
        self._compiling: dict[int, asyncio.Future[None]] = {}
        self._receiver = asyncio.create_task(self._receive())
        self._receiver.add_done_callback(self._on_receiver_end)

    @classmethod
    async def launch(cls, spec: "ModelSpec", config: EngineConfig | None = None) -> "EngineClient":
        """Start a process and wait until its engine serves.

        Raises ConfigError when what was asked for can't be, and EngineDeadError when the process fails otherwise.
        """
        return await cls.adopt(EngineProcess(partial(_given, spec, config or EngineConfig())))

    @classmethod
    async def adopt(cls, owned: EngineProcess) -> "EngineClient":
        """Wait until a started engine serves; from now on it ends when this client does. Raises as `launch` does."""
        try:
            return await cls._join(owned.address, owned)
        except BaseException as error:
            # One that failed ends by itself; one that nobody waits for any more may be busy for minutes.
            if not isinstance(error, Exception):
                owned.kill()
            await owned.close()
            raise

    @classmethod
    async def connect(cls, address: EngineAddress) -> "EngineClient":
        """Join an engine that another process owns, and wait until it serves. Raises as `launch` does."""
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
                    raise EngineDeadError(_obituary(owned))
                case other:
                    raise EngineDeadError(f"the engine began with {type(other).__name__}, not with Ready")
        except BaseException:
            socket.close()
            raise

    async def compile(self, spec: GrammarSpec) -> None:
        """See `Engine.compile`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        key = next(self._keys)
        self._compiling[key] = answer = asyncio.get_running_loop().create_future()
        self._socket.send(wire.Compile(key, spec))
        await answer

    async def stop(self) -> None:
        """Leave the engine, and end it if it is this client's; requests still running get an EngineDeadError."""
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
                case wire.Compiled(key, error):
                    self._settle(key, None if error is None else GrammarError(error))
                case wire.Dead(reason):
                    self._die(reason)
                case None:
                    self._die(_obituary(self._owned))
                case other:
                    self._die(f"the engine sent {type(other).__name__} while it was serving")

    def _on_receiver_end(self, receiver: "asyncio.Task[None]") -> None:
        """Fail all readers when reading messages failed: no further output would reach them."""
        if receiver.cancelled() or (error := receiver.exception()) is None:
            return
        _log.error("engine client failed", exc_info=error)
        self._die(f"the engine's messages can't be read: {type(error).__name__}: {error}")

    def _settle(self, key: int, error: Exception | None) -> None:
        answer = self._compiling.pop(key)
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _die(self, reason: str) -> None:
        super()._die(reason)
        for key in tuple(self._compiling):
            self._settle(key, EngineDeadError(reason))

    def _submit(self, request: Request) -> None:
        self._socket.send(wire.Submit.of(request))

    def _abort(self, key: int) -> None:
        self._socket.send(wire.Abort(key))


class EngineSocket:
    """The way to an engine and back."""

    def __init__(self, address: EngineAddress):
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address.endpoint)
        # Its own, as an event loop watches a descriptor for one only, and the address may go before its users.
        self._lifeline = os.dup(address.lifeline.fileno())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._lifeline, self._on_end)
        self._next: asyncio.Future[bytes] | None = None
        self._over = False

    def send(self, message: wire.ToEngine) -> None:
        """Queue a message; it goes out even if the engine is still starting."""
        # The high-water mark is off, so this queues at once; the future only reports that.
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.ToClient | None:
        """The next message; None once the engine is gone and all that it sent has been read."""
        self._next = coming = asyncio.ensure_future(self._socket.recv())
        if not coming.done():
            if self._over:
                return None
            # Not awaited itself, as it is cancelled when nothing more will come.
            await asyncio.wait((coming,))
        return None if coming.cancelled() else wire.decode_to_client(coming.result())

    def close(self) -> None:
        """Let go of the engine."""
        self._loop.remove_reader(self._lifeline)
        os.close(self._lifeline)
        self._socket.close()
        self._context.term()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._lifeline)
        self._loop.call_later(_LAST_WORDS_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._over = True
        if self._next is not None:
            self._next.cancel()


def _given(spec: "ModelSpec", config: EngineConfig) -> tuple["ModelSpec", EngineConfig]:
    """The recipe of a model that is described already."""
    return spec, config


def _obituary(owned: EngineProcess | None) -> str:
    code = None if owned is None else owned.exit_code
    return "the engine process died" + ("" if code is None else f" (exit code {code})")
