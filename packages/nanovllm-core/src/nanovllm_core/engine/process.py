"""Runs an engine in a process of its own, which serves any number of clients over a ZeroMQ socket.

Importing this module does not import torch, because processes that only start an engine do not need it.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from nanovllm_core.config import EngineConfig
from nanovllm_core.engine import wire
from nanovllm_core.engine.parent import exit_with_parent, parent_is_gone
from nanovllm_core.engine.status import EngineStats
from nanovllm_core.request import GrammarError, StepOutputs

if TYPE_CHECKING:
    from nanovllm_core.engine.loop import EngineLoop
    from nanovllm_core.model import ModelSpec

Recipe = Callable[[], tuple["ModelSpec", EngineConfig]]

_log = logging.getLogger(__name__)


def main(recipe: Recipe, endpoint: str, lifeline: Connection) -> None:
    """Serve the engine of `recipe` until a client stops it, its loop fails or the parent process ends.

    endpoint: ZeroMQ endpoint to bind; the only file in its directory. If the parent has ended, both are removed.
    lifeline: kept open while this process lives, so that clients detect its end.
    """
    # Terminals and service managers send these signals to all processes. The parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    remove = partial(_remove_socket, endpoint)
    # Watch the parent before the model loads, because loading blocks the event loop for minutes.
    serving = exit_with_parent(remove)
    with lifeline, contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(recipe, endpoint, serving))
    if parent_is_gone():
        remove()


def _remove_socket(endpoint: str) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        # Fails if the directory has other files, which must not be removed.
        path.parent.rmdir()


async def _serve(recipe: Recipe, endpoint: str, serving: threading.Event) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        # No high-water marks: messages are neither dropped nor blocked. Sending to a disconnected client is an error.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(endpoint)
        _stop_with_parent(asyncio.current_task())
        try:
            from nanovllm_core.engine.async_engine import build_loop

            engine = await build_loop(*recipe())
        except Exception as error:  # noqa: BLE001 (sent to the clients, which raise it)
            expected = isinstance(error, ValueError)
            if not expected:
                _log.exception("the engine could not start")
            await _send_to_all(socket, wire.Failed(_one_line(error), expected))
            return
        # Objects of the start-up live until the end, so exclude them from garbage collections.
        gc.collect()
        gc.freeze()
        serving.set()
        await EngineServer(engine, socket).run()


def _stop_with_parent(task: "asyncio.Task[None] | None") -> None:
    parent = multiprocessing.parent_process()
    if parent is None or task is None:
        return
    loop, sentinel = asyncio.get_running_loop(), parent.sentinel

    def stop() -> None:
        loop.remove_reader(sentinel)
        task.cancel()

    loop.add_reader(sentinel, stop)


async def _send_to_all(socket: zmq.asyncio.Socket, message: wire.ToClient) -> None:
    """Wait for the first client, then send `message` to all clients that have connected by then."""
    payload = wire.encode(message)
    while True:
        client, _ = await socket.recv_multipart()
        with contextlib.suppress(zmq.ZMQError):
            await socket.send_multipart([client, payload])
        if not await socket.poll(0):
            return


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


@dataclass(slots=True)
class Client:
    """A client that sent Hello. keys: keys of its open requests."""

    identity: bytes
    keys: set[int] = field(default_factory=set[int])


class EngineServer:
    """Connects a loop to its clients. Each request's outputs go to the client that sent it."""

    def __init__(self, engine: "EngineLoop", socket: zmq.asyncio.Socket):
        self._engine = engine
        self._socket = socket
        # By client number, in the order of connection. No number is used twice.
        self._clients: dict[int, Client] = {}
        self._numbers = itertools.count()
        self._compiling: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a client sends Stop or the loop fails."""
        receiver = asyncio.create_task(self._receive())
        # If receiving fails, stop the engine: clients detect that, but not an engine that receives nothing.
        receiver.add_done_callback(lambda _: self._engine.stop())
        try:
            await self._engine.run(self._emit)
        except Exception as error:  # noqa: BLE001 (sent to the clients, which raise it)
            _log.exception("the engine failed")
            for number in tuple(self._clients):
                self._send(number, wire.Dead(f"the engine failed: {_one_line(error)}"))
        if receiver.done():
            receiver.result()
        receiver.cancel()

    async def _receive(self) -> None:
        while True:
            identity, payload = await self._socket.recv_multipart()
            message: wire.ToEngine = wire.decode_to_engine(payload)
            match message:
                case wire.Hello():
                    number = next(self._numbers)
                    self._clients[number] = Client(identity)
                    self._send(number, wire.Ready(self._engine.info, number * wire.KEYS_PER_CLIENT))
                case wire.Submit(key):
                    # Ignore messages of clients that have disconnected.
                    if (client := self._client_of(key)) is not None:
                        client.keys.add(key)
                        self._engine.submit(message.request())
                case wire.Abort(key):
                    if (client := self._client_of(key)) is not None:
                        client.keys.discard(key)
                        self._engine.abort(key)
                case wire.Compile():
                    compiling = asyncio.create_task(self._compile(message))
                    self._compiling.add(compiling)
                    compiling.add_done_callback(self._compiling.discard)
                case wire.Stop():
                    self._engine.stop()

    async def _compile(self, message: wire.Compile) -> None:
        try:
            answer = wire.Compiled(message.key, parameter_types=await self._engine.compile(message.grammar))
        except GrammarError as error:
            answer = wire.Compiled(message.key, (error.message, error.place, error.code))
        if self._client_of(message.key) is not None:
            self._send(message.key // wire.KEYS_PER_CLIENT, answer)

    def _client_of(self, key: int) -> Client | None:
        return self._clients.get(key // wire.KEYS_PER_CLIENT)

    def _emit(self, outputs: StepOutputs, stats: EngineStats | None) -> None:
        parts = split_by_client(outputs)
        for key in (*(key for key, _, _ in outputs.ends), *(key for key, _ in outputs.failures)):
            if (client := self._client_of(key)) is not None:
                client.keys.discard(key)
        for number in tuple(self._clients):
            if number in parts or stats is not None:
                self._send(number, wire.Step(parts.get(number, StepOutputs()), stats))

    def _send(self, number: int, message: wire.ToClient) -> None:
        client = self._clients[number]
        # The high-water mark is off, so the future is done at once or has failed.
        sent = asyncio.ensure_future(self._socket.send_multipart([client.identity, wire.encode(message)]))
        if sent.done() and isinstance(error := sent.exception(), zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
            # The client has disconnected: abort its requests.
            for key in self._clients.pop(number).keys:
                self._engine.abort(key)


def split_by_client(outputs: StepOutputs) -> dict[int, StepOutputs]:
    """Split a step's outputs by client number. Clients without outputs are left out."""
    clients = [key // wire.KEYS_PER_CLIENT for key in outputs.keys]
    others = (*outputs.failures, *outputs.prompt_logprobs)
    numbers = set(clients).union(key // wire.KEYS_PER_CLIENT for key, _ in others)
    if len(numbers) <= 1:
        return dict.fromkeys(numbers, outputs)
    parts = {number: StepOutputs() for number in numbers}
    for number, key, token in zip(clients, outputs.keys, outputs.tokens, strict=True):
        part = parts[number]
        part.keys.append(key)
        part.tokens.append(token)
    for logprobs in outputs.logprobs:
        parts[logprobs[0] // wire.KEYS_PER_CLIENT].logprobs.append(logprobs)
    for begin in outputs.begins:
        parts[begin[0] // wire.KEYS_PER_CLIENT].begins.append(begin)
    for end in outputs.ends:
        parts[end[0] // wire.KEYS_PER_CLIENT].ends.append(end)
    for failure in outputs.failures:
        parts[failure[0] // wire.KEYS_PER_CLIENT].failures.append(failure)
    for prompt_logprobs in outputs.prompt_logprobs:
        parts[prompt_logprobs[0] // wire.KEYS_PER_CLIENT].prompt_logprobs.append(prompt_logprobs)
    return parts
