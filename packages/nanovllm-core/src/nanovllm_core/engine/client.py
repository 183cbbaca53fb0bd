"""The client of an engine in another process.

The process that starts the engine owns the engine. Other child processes of the owner may connect to the engine too.
"""

import asyncio
import logging
import os
import uuid
from functools import partial
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from nanovllm_core.config import EngineConfig
from nanovllm_core.engine import wire
from nanovllm_core.engine.interface import Engine
from nanovllm_core.engine.process import EngineAddress, EngineProcess
from nanovllm_core.errors import ConfigError, EngineDeadError, GrammarError
from nanovllm_core.grammar_types import GrammarSpec, ParameterTypes
from nanovllm_core.request import Request

if TYPE_CHECKING:
    from nanovllm_core.model import ModelSpec

# After the engine's process has ended, the client reads remaining messages for this time.
_DRAIN_S = 0.1

_log = logging.getLogger(__name__)


class EngineClient(Engine):
    """The client of an engine in another process. Create a client with `launch`, `adopt` or `connect`."""

    def __init__(self, ready: wire.Ready, socket: "EngineSocket", owned_process: EngineProcess | None):
        super().__init__(ready.info, ready.first_request_key)
        self.address = socket.address
        self._socket = socket
        self._owned_process = owned_process
        # Results of unanswered calls of `compile_grammar` and `reset_prefix_cache`, by key. A reset results in {}.
        self._futures: dict[int, asyncio.Future[ParameterTypes]] = {}
        self._receive_task = asyncio.create_task(self._receive())
        self._receive_task.add_done_callback(self._on_receive_end)

    @classmethod
    async def launch(cls, spec: "ModelSpec", config: EngineConfig | None = None) -> "EngineClient":
        """Start an engine process and wait until the engine serves. Raises ConfigError, EngineDeadError."""
        return await cls.adopt(EngineProcess(partial(_spec_and_config, spec, config or EngineConfig())))

    @classmethod
    async def adopt(cls, owned_process: EngineProcess) -> "EngineClient":
        """Return a client that owns a started engine, once the engine serves. Raises ConfigError, EngineDeadError."""
        try:
            return await cls._connect(owned_process.address, owned_process)
        except BaseException as error:
            # A failed engine ends by itself. If the caller cancels, kill the engine, which could load for minutes more.
            if not isinstance(error, Exception):
                owned_process.kill()
            await owned_process.close()
            raise

    @classmethod
    async def connect(cls, address: EngineAddress) -> "EngineClient":
        """Connect to another process's engine, once the engine serves. Raises ConfigError, EngineDeadError."""
        return await cls._connect(address, None)

    @classmethod
    async def _connect(cls, address: EngineAddress, owned_process: EngineProcess | None) -> "EngineClient":
        socket = EngineSocket(address)
        try:
            socket.send(wire.Hello())
            match await socket.receive():
                case wire.Ready() as ready:
                    return cls(ready, socket, owned_process)
                case wire.StartFailed(message, is_config_error):
                    raise (ConfigError if is_config_error else EngineDeadError)(message)
                case None:
                    raise EngineDeadError(_death_message(owned_process))
                case other:
                    raise EngineDeadError(f"the engine's first message was {type(other).__name__} instead of Ready")
        except BaseException:
            socket.close()
            raise

    async def compile_grammar(self, spec: GrammarSpec) -> ParameterTypes:
        """See `Engine.compile_grammar`."""
        key, future = self._begin_call()
        self._socket.send(wire.Compile(key, spec))
        try:
            return await future
        except asyncio.CancelledError:
            # The cancelled future stays in `_futures` until the engine answers. `_end_call` then ignores the answer.
            if self.death_reason is None:
                self._socket.send(wire.Abort(key))
            raise

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        key, future = self._begin_call()
        self._socket.send(wire.ResetPrefixCache(key))
        await future

    def _begin_call(self) -> "tuple[int, asyncio.Future[ParameterTypes]]":
        if self.death_reason is not None:
            raise EngineDeadError(self.death_reason)
        key = next(self._keys)
        self._futures[key] = future = asyncio.get_running_loop().create_future()
        return key, future

    async def stop(self) -> None:
        """Disconnect, and stop the engine if this client owns it. Open requests fail with EngineDeadError.

        Further calls do nothing.
        """
        if self._socket.is_closed:
            return
        self._receive_task.cancel()
        self._die("the engine was stopped")
        if self._owned_process is None:
            self._socket.close()
            return
        self._socket.send(wire.Stop())
        await self._owned_process.close()
        self._socket.close()

    async def _receive(self) -> None:
        while self.death_reason is None:
            match await self._socket.receive():
                case wire.Step(outputs, stats):
                    if stats is not None:
                        self.stats = stats
                    self._output_buffers.dispatch(outputs)
                case wire.Compiled(key, error, parameter_types):
                    self._end_call(key, parameter_types if error is None else GrammarError(*error))
                case wire.PrefixCacheReset(key):
                    self._end_call(key, {})
                case wire.EngineDied(reason):
                    self._die(reason)
                case None:
                    self._die(_death_message(self._owned_process))
                case other:
                    self._die(f"the engine sent {type(other).__name__} while it was serving")

    def _on_receive_end(self, receive_task: "asyncio.Task[None]") -> None:
        if receive_task.cancelled() or (error := receive_task.exception()) is None:
            return
        _log.error("engine client failed", exc_info=error)
        self._die(f"the engine's messages can't be read: {type(error).__name__}: {error}")

    def _end_call(self, key: int, result: ParameterTypes | Exception) -> None:
        future = self._futures.pop(key)
        if future.cancelled():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _die(self, reason: str) -> None:
        super()._die(reason)
        for key in tuple(self._futures):
            self._end_call(key, EngineDeadError(reason))

    def _submit(self, key: int, request: Request) -> None:
        self._socket.send(wire.Submit.from_request(key, request))

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
        # The lifeline is a pipe that closes when the engine's process ends. Duplicate its descriptor: the event loop
        # accepts one reader per descriptor, and the original may be closed.
        self._lifeline_fd = os.dup(address.lifeline.fileno())
        self._event_loop = asyncio.get_running_loop()
        self._event_loop.add_reader(self._lifeline_fd, self._on_process_end)
        self._receive_future: asyncio.Future[bytes] | None = None
        self._is_drain_over = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.closed

    def send(self, message: wire.ToEngine) -> None:
        """Queue a message for the engine, which may still be starting."""
        # Without a high-water mark, the message is queued at once, so the returned future is not needed.
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.ToClient | None:
        """Receive a message. Returns None if the engine's process has ended and no message is left."""
        self._receive_future = future = asyncio.ensure_future(self._socket.recv())
        if not future.done():
            if self._is_drain_over:
                return None
            # `wait` does not raise if `_stop_reading` cancels the future.
            await asyncio.wait((future,))
        return None if future.cancelled() else wire.decode_to_client(future.result())

    def close(self) -> None:
        """Close the connection. Further calls do nothing."""
        if self.is_closed:
            return
        self._event_loop.remove_reader(self._lifeline_fd)
        os.close(self._lifeline_fd)
        self._socket.close()
        self._context.term()

    def _on_process_end(self) -> None:
        self._event_loop.remove_reader(self._lifeline_fd)
        self._event_loop.call_later(_DRAIN_S, self._stop_reading)

    def _stop_reading(self) -> None:
        self._is_drain_over = True
        if self._receive_future is not None:
            self._receive_future.cancel()


def _spec_and_config(spec: "ModelSpec", config: EngineConfig) -> tuple["ModelSpec", EngineConfig]:
    """Return the arguments. With the arguments bound, this function is the loader of `EngineProcess`."""
    return spec, config


def _death_message(owned_process: EngineProcess | None) -> str:
    code = None if owned_process is None else owned_process.exit_code
    return "the engine process died" + ("" if code is None else f" (exit code {code})")
