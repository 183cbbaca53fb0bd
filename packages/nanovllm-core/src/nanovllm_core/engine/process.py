"""The engine in a process of its own: a loop, and a socket that brings its requests and takes its outputs away.

It ends when told to, when its loop fails, or when the process that started it is gone. This room must not know what a
client does with the outputs.
"""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Sequence

import zmq
import zmq.asyncio

from nanovllm_core.config import EngineConfig
from nanovllm_core.engine import wire
from nanovllm_core.engine.async_engine import build_loop
from nanovllm_core.engine.loop import EngineLoop
from nanovllm_core.engine.status import EngineStats
from nanovllm_core.model import ModelSpec
from nanovllm_core.request import RequestOutput

_log = logging.getLogger(__name__)


def main(spec: ModelSpec, config: EngineConfig, address: str) -> None:
    """Run an engine behind the ZeroMQ `address`, which this process binds, until it is over."""
    # Ctrl-C reaches the whole foreground group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(spec, config, address))


async def _serve(spec: ModelSpec, config: EngineConfig, address: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        # A message is dropped, never blocked on, when its client has gone; while it is there nothing may be.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        _stop_with_parent(asyncio.current_task())
        try:
            engine = await build_loop(spec, config)
        except Exception as error:  # noqa: BLE001 (told to the client, who raises it)
            expected = isinstance(error, ValueError)
            if not expected:
                _log.exception("the engine could not start")
            client, _ = await socket.recv_multipart()
            await socket.send_multipart([client, wire.encode(wire.Failed(_one_line(error), expected))])
            return
        # What start-up made stays; a collection need not look at it again.
        gc.collect()
        gc.freeze()
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


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


class EngineServer:
    """Connects a loop to its clients. Each request's outputs go to the client that sent it."""

    def __init__(self, engine: EngineLoop, socket: zmq.asyncio.Socket):
        self._engine = engine
        self._socket = socket
        self._owners: dict[str, bytes] = {}
        self._clients: set[bytes] = set()

    async def run(self) -> None:
        """Serve until a client says Stop or the loop fails."""
        receiver = asyncio.create_task(self._receive())
        # Without it the engine would be deaf: better to end, which the clients notice.
        receiver.add_done_callback(lambda _: self._engine.stop())
        try:
            await self._engine.run(self._emit)
        except Exception as error:  # noqa: BLE001 (told to the clients, who raise it)
            _log.exception("the engine failed")
            for client in self._clients:
                self._send(client, wire.Dead(f"the engine failed: {_one_line(error)}"))
        if receiver.done():
            receiver.result()
        receiver.cancel()

    async def _receive(self) -> None:
        while True:
            client, payload = await self._socket.recv_multipart()
            message: wire.ToEngine = wire.decode_to_engine(payload)
            match message:
                case wire.Hello():
                    self._clients.add(client)
                    self._send(client, wire.Ready(self._engine.info))
                case wire.Submit():
                    self._owners[message.id] = client
                    self._engine.submit(message.request())
                case wire.Abort(request_id):
                    self._owners.pop(request_id, None)
                    self._engine.abort(request_id)
                case wire.Stop():
                    self._engine.stop()

    def _emit(self, outputs: Sequence[RequestOutput], stats: EngineStats) -> None:
        by_client: defaultdict[bytes, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            client = self._owners.get(output.id)
            if client is None:
                continue
            by_client[client].append(output)
            if output.finish_reason is not None:
                del self._owners[output.id]
        for client in self._clients:
            self._send(client, wire.Step(by_client[client], stats))

    def _send(self, client: bytes, message: wire.ToClient) -> None:
        # The high-water mark is off, so this queues at once; the future only reports that.
        self._socket.send_multipart([client, wire.encode(message)])
