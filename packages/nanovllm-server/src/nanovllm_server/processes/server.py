"""The parent process: binds the port, starts engine and workers, opens the port, drains and stops them.

It handles signals, which all other processes ignore. It binds before the model loads, so that a wrong port fails early.
"""

import asyncio
import gc
import resource
import signal
import socket
import sys
from contextlib import ExitStack
from typing import Any

from nanovllm_core import EngineClient, EngineInfo, EngineProcess
from nanovllm_core.config import GIB
from nanovllm_models import default_model_path
from nanovllm_server import __version__
from nanovllm_server.observability.logs import get_logger
from nanovllm_server.observability.shared_counters import allocate_counters
from nanovllm_server.processes.encoding_exchange import allocate_rings
from nanovllm_server.processes.engine_recipe import EngineRecipe
from nanovllm_server.processes.worker_pool import WorkerPool
from nanovllm_server.processes.worker_protocol import WorkerArguments
from nanovllm_server.settings import Settings, SettingsError, read_template, sampling_defaults

BACKLOG = 2048
# Most unsent bytes of a connection in the kernel. Further text waits in the worker, where it is merged into one event.
UNSENT_BYTES = 16 << 10
# The kernel drops a client that acknowledges nothing for this long.
STALLED_S = 75
CLOSE_S = 5.0
DEATH_GRACE_S = 3.0
WATCH_S = 0.25


async def run(settings: Settings) -> int:
    """Serves until SIGTERM, SIGINT or the death of the engine. Returns the exit status.

    Raises SettingsError, ModelError, ConfigError, EngineDeadError or RuntimeError if the start fails.
    """
    raise_file_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with ExitStack() as stack:
        listeners = bind(settings.host, settings.port, settings.http_workers)
        for listener in listeners:
            stack.enter_context(listener)
        starting = loop.create_task(_start(settings, listeners))
        if not await _started_before(starting, stop):
            return 0
        engine, workers = starting.result()
        try:
            return await _serve(settings, listeners, engine, workers, stop)
        finally:
            workers.kill()
            await engine.stop()


def raise_file_limit() -> None:
    """Raises the limit of open files, and so of connections, to the hard limit. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int, count: int) -> list[socket.socket]:
    """Returns `count` sockets bound to `host` and `port` (0: any free one) that share connections.

    Raises SettingsError.
    """
    listeners: list[socket.socket] = []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise SettingsError(f"can't listen on {host}: {error.strerror}") from error
    try:
        if port:
            _check_free(family, address)
        for _ in range(count):
            listener = socket.socket(family)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Each worker has its own queue, to which the kernel assigns connections by their hash. With one queue for
            # all, the first worker to wake takes all connections: of 16 clients, one of four workers got 15.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            if sys.platform == "linux":
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
            listener.bind(address)
            listener.setblocking(False)
            address = listener.getsockname()
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise SettingsError(f"can't listen on {host} port {port}: {error.strerror}") from error
    return listeners


def _check_free(family: int, address: Any) -> None:
    # SO_REUSEPORT would let a second server of the same user share the port. A socket without it detects that.
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


async def _started_before(starting: "asyncio.Task[tuple[EngineClient, WorkerPool]]", stop: asyncio.Event) -> bool:
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done() and not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return False
    stopping.cancel()
    return True


async def _start(settings: Settings, listeners: list[socket.socket]) -> tuple[EngineClient, WorkerPool]:
    model = settings.model or await asyncio.to_thread(default_model_path)
    defaults = sampling_defaults(model)
    template = None if settings.chat_template is None else read_template(settings.chat_template)
    process = EngineProcess(EngineRecipe(model, settings.load_format, settings.dtype, settings.engine))
    counters = allocate_counters(len(listeners))
    rings = allocate_rings(len(listeners))
    # The workers load the tokenizer while the engine loads the model.
    workers = WorkerPool(
        [
            WorkerArguments(index, settings, model, template, defaults, process.address, listener, counters, rings)
            for index, listener in enumerate(listeners)
        ]
    )
    engine_ready = asyncio.create_task(EngineClient.adopt(process))
    workers_ready = asyncio.create_task(workers.ready())
    try:
        await asyncio.wait((engine_ready, workers_ready), return_when=asyncio.FIRST_EXCEPTION)
        # The engine's error first: if the engine can't start, the workers fail as a consequence.
        for task in (engine_ready, workers_ready):
            if task.done():
                task.result()
        return engine_ready.result(), workers
    except BaseException:
        workers.kill()
        workers_ready.cancel()
        engine_ready.cancel()
        await asyncio.wait((engine_ready, workers_ready))
        if not engine_ready.cancelled() and engine_ready.exception() is None:
            await engine_ready.result().stop()
        raise


async def _serve(
    settings: Settings, listeners: list[socket.socket], engine: EngineClient, workers: WorkerPool, stop: asyncio.Event
) -> int:
    logger = get_logger("nanovllm")
    host, port = listeners[0].getsockname()[:2]
    try:
        # Checked again, because another process may have opened the port since `bind`.
        _check_free(listeners[0].family, listeners[0].getsockname())
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError as error:
        raise SettingsError(f"can't listen on {host} port {port}: {error.strerror}") from error
    workers.open()
    gc.collect()
    gc.freeze()
    sys.stdout.write(banner(engine.info, settings, host, port))
    sys.stdout.flush()
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(_wait_for_death(engine))
    await asyncio.wait((stopping, dying, workers.failed), return_when=asyncio.FIRST_COMPLETED)
    failed = workers.failed.done()
    if failed:
        logger.error("an HTTP worker can't be replaced", reason=str(workers.failed.exception()))
    if not dying.done():
        logger.info("draining", seconds=settings.drain_s)
        draining = asyncio.create_task(workers.drain())
        await asyncio.wait((draining, dying), timeout=settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
    if dying.done():
        logger.error("engine died", reason=engine.dead)
        # Gives running requests and /health time to report the failure.
        await asyncio.wait((stopping,), timeout=DEATH_GRACE_S)
    status = 1 if failed or engine.dead is not None else 0
    for task in (stopping, dying):
        task.cancel()
    await workers.close(CLOSE_S)
    return status


async def _wait_for_death(engine: EngineClient) -> None:
    # `EngineClient` has no event for its death, and the delay of this poll does no harm.
    while engine.dead is None:  # noqa: ASYNC110
        await asyncio.sleep(WATCH_S)


def banner(info: EngineInfo, settings: Settings, host: str, port: int) -> str:
    """The text that the server prints when it begins to serve, with a curl command to try it."""
    names = settings.names or (info.model,)
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    url = f"http://{shown}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys else ""
    workers = f" ({settings.http_workers} workers)" if settings.http_workers > 1 else ""
    cache = f"{info.kv_cache_tokens} tokens ({info.kv_cache_bytes / GIB:.2f} GiB of {info.kv_cache_dtype})"
    if info.num_state_slots:
        cache += f", {info.num_state_slots} states ({info.state_bytes / GIB:.2f} GiB)"
    return (
        f"nanovllm-server {__version__}\n"
        f"  address  {url}{workers}\n"
        f"  model    {', '.join(names)} ({info.dtype} on {info.device}, attention: {info.attention_backend})\n"
        f"  products {info.arithmetic}\n"
        f"  cache    {cache}, context {info.max_model_len} tokens, {info.max_num_seqs} requests at once\n\n"
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n'
    )
