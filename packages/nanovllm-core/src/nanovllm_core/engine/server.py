"""Runs an engine in a separate process, which serves its clients over a ZeroMQ socket.

This module does not import torch, because processes that only start an engine do not need torch.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from nanovllm_core.config import EngineConfig
from nanovllm_core.engine import progress_bars, wire
from nanovllm_core.engine.parent_watch import FAILURE_EXIT_CODE, exit_with_parent, has_parent_ended
from nanovllm_core.engine.private_directory import find_private_directory, remove_private_directory
from nanovllm_core.engine.status import EngineStats
from nanovllm_core.engine.thread_names import is_engine_thread_alive
from nanovllm_core.errors import GrammarError
from nanovllm_core.malloc_heaps import limit_malloc_heaps
from nanovllm_core.outputs import StepOutputs
from nanovllm_core.start_phases import log_phase
from nanovllm_core.stop_signals import ignore_stop_signals

if TYPE_CHECKING:
    from nanovllm_core.engine.loop import EngineLoop
    from nanovllm_core.model import ModelSpec

# Returns the model's spec and the settings. The engine's process calls the function, which may import torch.
SpecAndConfigLoader = Callable[[], tuple["ModelSpec", EngineConfig]]

# Maximum number of malloc heaps. If each thread that compiles grammars had its own heap, freed grammars would leave
# more unused memory.
NUM_HEAPS = 2
# Fields of `StepOutputs` whose entries begin with a request key.
ENTRY_FIELDS = ("logprobs", "starts", "finishes", "failures", "prompt_logprobs", "draft_totals")

_log = logging.getLogger(__name__)


def run_engine(load_spec_and_config: SpecAndConfigLoader, endpoint: str, lifeline: Connection) -> None:
    """Load a model and serve it until a client stops the engine, its loop fails or the parent process ends.

    endpoint: ZeroMQ endpoint to bind, in an empty directory. The process removes the directory if the parent has ended.
    lifeline: write end of a pipe, which stays open while this process lives. Clients detect its closing.
    """
    ignore_stop_signals()
    limit_malloc_heaps(NUM_HEAPS)
    progress_bars.use_thread_lock()
    remove_directory = partial(remove_private_directory, endpoint)
    # Watch the parent before the model loads, because loading blocks the event loop for minutes.
    graceful_exit_event = exit_with_parent(remove_directory)
    with lifeline, contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(load_spec_and_config, endpoint, graceful_exit_event))
    if has_parent_ended():
        remove_directory()
    if is_engine_thread_alive():
        # The thread that runs the model waits for a rank that has ended. A normal exit would wait for the thread.
        logging.shutdown()
        os._exit(FAILURE_EXIT_CODE)


async def _serve(
    load_spec_and_config: SpecAndConfigLoader, endpoint: str, graceful_exit_event: threading.Event
) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        # Without high-water marks, no message is dropped or blocked. Mandatory routing reports disconnected clients.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(endpoint)
        _stop_with_parent(asyncio.current_task())
        try:
            with log_phase("imports"):
                from nanovllm_core.engine.build import build_loop

                spec, config = load_spec_and_config()
            engine_loop = await build_loop(spec, config, find_private_directory(endpoint))
        except Exception as error:  # noqa: BLE001 (sent to the clients, which raise it)
            is_config_error = isinstance(error, ValueError)
            if not is_config_error:
                _log.exception("the engine could not start")
            await _send_to_all(socket, wire.StartFailed(_one_line(error), is_config_error))
            return
        # Exclude existing objects from garbage collections, because most of them live until the process ends.
        gc.collect()
        gc.freeze()
        graceful_exit_event.set()
        await EngineServer(engine_loop, socket).run()


def _stop_with_parent(task: "asyncio.Task[None] | None") -> None:
    """Cancel `task` when the parent process ends."""
    parent = multiprocessing.parent_process()
    if parent is None or task is None:
        return
    event_loop, sentinel = asyncio.get_running_loop(), parent.sentinel

    def stop() -> None:
        event_loop.remove_reader(sentinel)
        task.cancel()

    event_loop.add_reader(sentinel, stop)


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
class ConnectedClient:
    """A client that sent Hello. identity: ZeroMQ routing id. open_keys: keys of unfinished requests and calls."""

    identity: bytes
    open_keys: set[int] = field(default_factory=set[int])


class EngineServer:
    """Connects an engine's loop to the clients. The outputs of a request go to the client that sent the request."""

    def __init__(self, engine_loop: "EngineLoop", socket: zmq.asyncio.Socket):
        self._engine_loop = engine_loop
        self._socket = socket
        self._clients_by_number: dict[int, ConnectedClient] = {}
        self._client_numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._compile_tasks: dict[int, asyncio.Task[None]] = {}  # unanswered calls, by key

    async def run(self) -> None:
        """Serve until a client sends Stop or the loop fails."""
        receive_task = asyncio.create_task(self._receive())
        # If receiving fails, stop the engine: clients detect a stopped engine, but not an engine that receives nothing.
        receive_task.add_done_callback(lambda _: self._engine_loop.stop())
        try:
            await self._engine_loop.run(self._emit)
        except Exception as error:  # noqa: BLE001 (sent to the clients, which raise it)
            _log.exception("the engine failed")
            for client_number in tuple(self._clients_by_number):
                self._send(client_number, wire.EngineDied(f"the engine failed: {_one_line(error)}"))
        if receive_task.done():
            receive_task.result()
        receive_task.cancel()

    async def _receive(self) -> None:
        while True:
            identity, payload = await self._socket.recv_multipart()
            message: wire.ToEngine = wire.decode_to_engine(payload)
            match message:
                case wire.Hello():
                    client_number = next(self._client_numbers)
                    self._clients_by_number[client_number] = ConnectedClient(identity)
                    self._send(client_number, wire.Ready(self._engine_loop.info, client_number * wire.KEYS_PER_CLIENT))
                    # An idle engine sends no stats.
                    self._send(client_number, wire.Step(StepOutputs(), self._engine_loop.emitted_stats))
                case wire.Submit(key):
                    # Ignore messages of clients that have disconnected.
                    if (client := self._client_of(key)) is not None:
                        client.open_keys.add(key)
                        self._engine_loop.submit(key, message.to_request())
                case wire.Abort(key):
                    if (client := self._client_of(key)) is not None:
                        client.open_keys.discard(key)
                        self._abort(key)
                case wire.Compile(key):
                    if (client := self._client_of(key)) is not None:
                        client.open_keys.add(key)
                        self._compile_tasks[key] = self._start_task(self._compile(message))
                case wire.ResetPrefixCache(key):
                    self._start_task(self._reset_prefix_cache(key))
                case wire.Stop():
                    self._engine_loop.stop()

    def _start_task(self, coroutine: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _abort(self, key: int) -> None:
        """Abort a request or a call of Compile."""
        if (compile_task := self._compile_tasks.pop(key, None)) is None:
            self._engine_loop.abort(key)
            return
        compile_task.cancel()
        self._send(key // wire.KEYS_PER_CLIENT, wire.Compiled(key))

    async def _reset_prefix_cache(self, key: int) -> None:
        await self._engine_loop.reset_prefix_cache()
        self._send(key // wire.KEYS_PER_CLIENT, wire.PrefixCacheReset(key))

    async def _compile(self, message: wire.Compile) -> None:
        try:
            parameter_types = await self._engine_loop.compile_grammar(message.grammar)
            answer = wire.Compiled(message.key, parameter_types=parameter_types)
        except GrammarError as error:
            answer = wire.Compiled(message.key, (error.message, error.place, error.code))
        self._compile_tasks.pop(message.key, None)
        if (client := self._client_of(message.key)) is not None:
            client.open_keys.discard(message.key)
            self._send(message.key // wire.KEYS_PER_CLIENT, answer)

    def _client_of(self, key: int) -> ConnectedClient | None:
        return self._clients_by_number.get(key // wire.KEYS_PER_CLIENT)

    def _emit(self, outputs: StepOutputs, stats: EngineStats | None) -> None:
        outputs_by_client = split_by_client(outputs)
        for key in (entry.key for entry in (*outputs.finishes, *outputs.failures)):
            if (client := self._client_of(key)) is not None:
                client.open_keys.discard(key)
        for client_number in tuple(self._clients_by_number):
            if client_number in outputs_by_client or stats is not None:
                self._send(client_number, wire.Step(outputs_by_client.get(client_number, StepOutputs()), stats))

    def _send(self, client_number: int, message: wire.ToClient) -> None:
        """Send a message, unless the client has disconnected."""
        if (client := self._clients_by_number.get(client_number)) is None:
            return
        # Without a high-water mark, the future is done at once.
        future = asyncio.ensure_future(self._socket.send_multipart([client.identity, wire.encode(message)]))
        if future.done() and isinstance(error := future.exception(), zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
            # The client has disconnected: abort its requests and calls.
            for key in self._clients_by_number.pop(client_number).open_keys:
                self._abort(key)


def split_by_client(outputs: StepOutputs) -> dict[int, StepOutputs]:
    """Split a step's outputs by client number. The result has no entry for clients without outputs."""
    token_clients = [key // wire.KEYS_PER_CLIENT for key in outputs.keys]
    # Requests without a token in the step may also have entries, except log-probabilities of tokens.
    other_keys = (entry[0] for name in ENTRY_FIELDS if name != "logprobs" for entry in getattr(outputs, name))
    client_numbers = set(token_clients).union(key // wire.KEYS_PER_CLIENT for key in other_keys)
    if len(client_numbers) <= 1:
        return dict.fromkeys(client_numbers, outputs)
    parts = {client_number: StepOutputs() for client_number in client_numbers}
    for client_number, key, token in zip(token_clients, outputs.keys, outputs.tokens, strict=True):
        part = parts[client_number]
        part.keys.append(key)
        part.tokens.append(token)
    for name in ENTRY_FIELDS:
        for entry in getattr(outputs, name):
            getattr(parts[entry[0] // wire.KEYS_PER_CLIENT], name).append(entry)
    return parts
