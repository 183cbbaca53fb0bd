"""The parent process: starts the engine and the workers, opens the port, handles signals, drains, stops."""

import asyncio
import gc
import resource
import signal
import socket
import sys
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from multiprocessing import resource_tracker
from typing import Any

from nanovllm_core import EngineClient, EngineDeadError, EngineInfo, EngineProcess
from nanovllm_core.config import GIB
from nanovllm_core.start_phases import log_phase
from nanovllm_models import ModelDirectory
from nanovllm_server import __version__
from nanovllm_server.observability.logs import get_logger
from nanovllm_server.observability.shared_counters import allocate_counters
from nanovllm_server.processes.encoding_exchange import allocate_rings
from nanovllm_server.processes.engine_recipe import EngineRecipe
from nanovllm_server.processes.model_preparation import prepare_model
from nanovllm_server.processes.prefill_engine import (
    POLL_INTERVAL_S,
    PrefillEngine,
    start_prefill_engine,
    wait_for_death,
)
from nanovllm_server.processes.worker_pool import WorkerPool
from nanovllm_server.processes.worker_protocol import WorkerArguments
from nanovllm_server.settings import (
    BACKLOG,
    Settings,
    SettingsError,
    TransferSettings,
    read_sampling_defaults,
    read_template,
)

# Maximum unsent bytes per connection in the kernel. Above this number, the worker joins new text into one event.
MAX_UNSENT_BYTES = 16 << 10
# The kernel drops clients that acknowledge no data for this time.
ACKNOWLEDGE_TIMEOUT_S = 75
WORKER_CLOSE_TIMEOUT_S = 5.0  # workers that take longer to exit are killed
# Time for workers to report the engine's death to clients.
ENGINE_DEATH_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class ServerProcesses:
    """The running processes of a server. prefill_engine: None if the server has one engine."""

    engine: EngineClient
    workers: WorkerPool
    prefill_engine: PrefillEngine | None

    async def stop(self) -> None:
        """Stops all processes."""
        self.workers.kill()
        engines = [self.engine] if self.prefill_engine is None else [self.engine, self.prefill_engine]
        await asyncio.gather(*(engine.stop() for engine in engines))


async def run(settings: Settings) -> int:
    """Serves until SIGTERM, SIGINT, SIGHUP or the death of the engine. Returns the exit status.

    On the first signal, the server refuses new requests and finishes running requests. A second SIGTERM or SIGINT ends
    this drain.
    Raises SettingsError, ModelError, ConfigError, EngineDeadError or RuntimeError if the start fails.
    """
    raise_file_limit()
    stop, end_drain = asyncio.Event(), asyncio.Event()
    handle_signals(stop, end_drain)
    start_resource_tracker()
    with ExitStack() as stack:
        # Bind before the model loads: if the port is in use, the server fails at once.
        listeners = bind(settings.host, settings.port, settings.http_workers)
        for listener in listeners:
            stack.enter_context(listener)
        start_task = asyncio.create_task(_start(settings, listeners))
        if not await _finish_start(start_task, stop):
            return 0
        processes = start_task.result()
        try:
            return await _serve(settings, listeners, processes, stop, end_drain)
        finally:
            await processes.stop()


def handle_signals(stop: asyncio.Event, end_drain: asyncio.Event) -> None:
    """Sets `stop` on SIGTERM, SIGINT and SIGHUP. A SIGTERM or SIGINT after another signal sets `end_drain`.

    If SIGHUP is ignored, it remains ignored: `nohup` starts programs in this way.
    """

    def on_signal() -> None:
        (end_drain if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, on_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        # SIGHUP never ends the drain, because a shell and its terminal send two SIGHUPs when the terminal closes.
        loop.add_signal_handler(signal.SIGHUP, stop.set)


def start_resource_tracker() -> None:
    """Starts multiprocessing's resource tracker, which removes the semaphores of killed processes.

    SIGHUP must not end this process. multiprocessing itself protects it from SIGINT and SIGTERM.
    """
    # A new process inherits the blocked signals.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def raise_file_limit() -> None:
    """Raises the limit of open files to the hard limit: every connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int, num_sockets: int) -> list[socket.socket]:
    """Binds `num_sockets` sockets to one port (0: any free port). Raises SettingsError."""
    listeners: list[socket.socket] = []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise SettingsError(f"can't listen on {host}: {error.strerror}") from error
    except UnicodeError as error:
        raise SettingsError(f"can't listen on {host}: not the name of a host") from error
    try:
        if port:
            _check_port_is_free(family, address)
        for _ in range(num_sockets):
            listener = socket.socket(family)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # With one shared socket instead, the worker that wakes first would accept most connections.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            if sys.platform == "linux":
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ACKNOWLEDGE_TIMEOUT_S * 1000)
            listener.bind(address)
            listener.setblocking(False)
            address = listener.getsockname()  # Further sockets bind the port that the kernel chose for port 0.
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise _listen_error(host, port, error) from error
    return listeners


def _listen_error(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(f"can't listen on {host} port {port}: {error.strerror}; pass another --port or --host")


def _check_port_is_free(family: int, address: Any) -> None:
    # With SO_REUSEPORT, two servers would silently share a port. A socket without this option can't bind a port in use.
    with socket.socket(family) as test_socket:
        test_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        test_socket.bind(address)


async def _finish_start(start_task: asyncio.Task[ServerProcesses], stop: asyncio.Event) -> bool:
    """Returns True when `start_task` is done. If `stop` is set first, cancels the task and returns False."""
    stop_task = asyncio.create_task(stop.wait())
    await asyncio.wait((start_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
    if stop_task.done() and not start_task.done():
        start_task.cancel()
        await asyncio.wait((start_task,))
        return False
    stop_task.cancel()
    return True


async def _start(settings: Settings, listeners: list[socket.socket]) -> ServerProcesses:
    with log_phase("total"):
        with log_phase("model"):
            model = await prepare_model(settings.model, settings)
            draft_model = None
            if settings.draft_model is not None:
                draft_model = await prepare_model(settings.draft_model, settings)
        return await _start_processes(settings, listeners, model, draft_model)


async def _start_processes(
    settings: Settings, listeners: list[socket.socket], model: ModelDirectory, draft_model: ModelDirectory | None
) -> ServerProcesses:
    defaults = read_sampling_defaults(model.path)
    template = None if settings.chat_template is None else read_template(settings.chat_template)
    recipe = EngineRecipe(
        model, draft_model, settings.load_format, settings.log_format, settings.log_level, settings.engine_config
    )
    prefill_engine = None
    # The stack ends what has started, in reverse order, unless the whole start succeeds.
    async with AsyncExitStack() as stack:
        if settings.transfer.has_prefill_engine:
            recipe, prefill_engine = start_prefill_engine(recipe, settings.transfer)
            stack.push_async_callback(prefill_engine.stop)
        process = EngineProcess(recipe)
        engine_task = asyncio.create_task(EngineClient.adopt(process))
        stack.push_async_callback(_stop_engine, process, engine_task)
        counters, rings = allocate_counters(len(listeners)), allocate_rings(len(listeners))
        address, pid = process.address, process.pid
        arguments = [
            WorkerArguments(index, settings, model.path, template, defaults, address, pid, listener, counters, rings)
            for index, listener in enumerate(listeners)
        ]
        # The HTTP workers load the tokenizer while the engine loads the model.
        workers = WorkerPool(arguments, settings.worker_timeout_s)
        stack.callback(workers.kill)
        workers_task = asyncio.create_task(workers.wait_until_ready())
        stack.callback(workers_task.cancel)
        prefill_tasks = [] if prefill_engine is None else [prefill_engine.start_task]
        engine = await _wait_until_started(engine_task, [*prefill_tasks, workers_task])
        stack.pop_all()
        return ServerProcesses(engine, workers, prefill_engine)


async def _stop_engine(process: EngineProcess, start_task: asyncio.Task[EngineClient]) -> None:
    """Stops the engine, even while it starts."""
    start_task.cancel()
    await asyncio.wait((start_task,))
    if not start_task.cancelled() and start_task.exception() is None:
        await start_task.result().stop()
    elif process.exit_code is None:
        # The task was cancelled before its first step, so it has not ended the process.
        process.kill()
        await process.close()


async def _wait_until_started(
    engine_task: asyncio.Task[EngineClient], other_tasks: list[asyncio.Task[None]]
) -> EngineClient:
    """Waits until all tasks are done. Returns the engine's client.

    Raises the exceptions of the tasks, and EngineDeadError if the engine dies after `engine_task` is done.
    """
    pending: set[asyncio.Task[Any]] = {engine_task, *other_tasks}
    while pending:
        # Check regularly whether the engine lives: a worker that connects after the engine's death is never ready.
        _, pending = await asyncio.wait(pending, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_EXCEPTION)
        # Raise the error of an engine first, because a failed engine also makes the workers fail.
        if engine_task.done() and (reason := engine_task.result().death_reason) is not None:
            raise EngineDeadError(reason)
        for task in other_tasks:
            if task.done():
                task.result()
    return engine_task.result()


async def _serve(
    settings: Settings,
    listeners: list[socket.socket],
    processes: ServerProcesses,
    stop: asyncio.Event,
    end_drain: asyncio.Event,
) -> int:
    engine, workers = processes.engine, processes.workers
    logger = get_logger("nanovllm")
    host, port = listeners[0].getsockname()[:2]
    try:
        # Another process may have opened the port since `bind`.
        _check_port_is_free(listeners[0].family, listeners[0].getsockname())
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError as error:
        raise _listen_error(host, port, error) from error
    workers.open()
    if processes.prefill_engine is not None:
        processes.prefill_engine.keep_running()
    gc.collect()
    gc.freeze()
    sys.stdout.write(format_banner(engine.info, settings, host, port))
    sys.stdout.flush()
    stop_task = asyncio.create_task(stop.wait())
    death_task = asyncio.create_task(wait_for_death(engine))
    await asyncio.wait((stop_task, death_task, workers.failed), return_when=asyncio.FIRST_COMPLETED)
    has_pool_failed = workers.failed.done()
    if has_pool_failed:
        logger.error("an HTTP worker can't be replaced", reason=str(workers.failed.exception()))
    if not death_task.done():
        # If a worker's failure begins the drain, the first signal already ends it.
        stop.set()
        logger.info("draining", seconds=settings.drain_timeout_s, hint="SIGTERM or SIGINT ends the drain")
        drain_tasks = asyncio.create_task(workers.drain()), asyncio.create_task(end_drain.wait())
        await asyncio.wait(
            (*drain_tasks, death_task), timeout=settings.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in drain_tasks:
            task.cancel()
    if death_task.done():
        logger.error("engine died", reason=engine.death_reason)
        await asyncio.wait((stop_task,), timeout=ENGINE_DEATH_GRACE_S)
    exit_status = 1 if has_pool_failed or engine.death_reason is not None else 0
    for task in (stop_task, death_task):
        task.cancel()
    await workers.close(WORKER_CLOSE_TIMEOUT_S)
    return exit_status


def format_banner(info: EngineInfo, settings: Settings, host: str, port: int) -> str:
    """Returns the text that the server prints after the start."""
    names = settings.model_names or (info.model,)
    url_host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    url = f"http://{url_host}:{port}"
    is_public = not ip_address(host).is_loopback
    warning = (
        f"  warning  {host} accepts other machines, and requests need no key: set --api-key-file, or --host 127.0.0.1\n"
        if is_public and not settings.api_keys
        else ""
    )
    key_header = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys else ""
    workers = f" ({settings.http_workers} workers)" if settings.http_workers > 1 else ""
    cache = f"{info.kv_cache_tokens} tokens ({info.kv_cache_bytes / GIB:.2f} GiB of {info.kv_cache_dtype})"
    if info.num_state_slots:
        cache += f", {info.num_state_slots} states ({info.state_bytes / GIB:.2f} GiB)"
    device = info.device if info.num_ranks == 1 else f"{info.device}, {info.num_ranks} ranks"
    transfer = _describe_transfer(info, settings.transfer)
    return (
        f"nanovllm-server {__version__}\n"
        f"  address  {url}{workers}\n"
        f"{warning}"
        f"  page     {url}/\n"
        f"  model    {', '.join(names)} ({info.dtype} on {device}, attention: {info.attention_backend})\n"
        f"  matmul   {info.matmul_arithmetic}\n"
        f"  cache    {cache}, context {info.max_model_len} tokens, {info.max_num_seqs} requests at once\n"
        f"{transfer}\n"
        f"curl {url}/v1/chat/completions{key_header} -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n'
    )


def _describe_transfer(info: EngineInfo, settings: TransferSettings) -> str:
    """Returns the banner's line about other engines; "" without other engines."""
    if settings.has_prefill_engine:
        gpus = "" if settings.prefill_gpus is None else f" on GPU {settings.prefill_gpus}"
        return f"  transfer a second engine{gpus} computes long prompts\n"
    if info.transfer_address:
        return f"  transfer listens on {info.transfer_address}\n"
    return f"  transfer fetches from {', '.join(info.transfer_peers)}\n" if info.transfer_peers else ""
