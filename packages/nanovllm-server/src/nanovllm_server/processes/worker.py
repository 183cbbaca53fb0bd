"""Serves HTTP in a worker's process, and follows the orders of the parent."""

import asyncio
import gc
import logging
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import cast, get_args

from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

import nanovllm_models
from nanovllm_core import ConfigError, Engine, EngineClient, EngineDeadError
from nanovllm_core.malloc_heaps import return_freed_memory
from nanovllm_models.chat_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from nanovllm_models.token_bytes import VocabularyError
from nanovllm_server.chat.admission import AdmissionControl
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.chat.service import Service
from nanovllm_server.http.app import create_app
from nanovllm_server.http.connections import serve
from nanovllm_server.observability.logs import get_logger
from nanovllm_server.observability.loop_lag import measure_loop_lag
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.observability.process_metrics import ProcessMetrics
from nanovllm_server.observability.shared_counters import SharedCounters
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.parsing.model_format import ModelFormat
from nanovllm_server.processes.encoding_exchange import RingEncodingExchange
from nanovllm_server.processes.worker_protocol import StartFailure, WorkerArguments, WorkerOrder
from nanovllm_server.protocol.error import unavailable

CLOSE_TIMEOUT_S = 3.0  # time for open connections to end after the order "close"
# Timeout of idle connections and request headers. Longer than the timeouts of most clients and proxies: if the server
# closed an idle connection first, a client could send a request on the closed connection.
IDLE_TIMEOUT_S = 75
MEMORY_RETURN_INTERVAL_S = 10.0
SHUTDOWN_REASON = "the server is shutting down"


class ParentPipe:
    """Receives the parent's orders, and sends reports. Cancels the task that created this object if the parent ends."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._events: dict[WorkerOrder, asyncio.Event] = {order: asyncio.Event() for order in get_args(WorkerOrder)}
        self._loop = asyncio.get_running_loop()
        self._worker_task = asyncio.current_task()
        self._loop.add_reader(pipe.fileno(), self._on_order)

    def report(self, report: object) -> None:
        """Sends `report` to the parent."""
        self._pipe.send(report)

    async def wait(self, order: WorkerOrder) -> None:
        """Waits until the parent has given `order`."""
        await self._events[order].wait()

    def _on_order(self) -> None:
        try:
            order: WorkerOrder = self._pipe.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())
            if self._worker_task is not None:
                self._worker_task.cancel()
            return
        if order == "report_alive":
            # If the parent has ended, the next call of this function cancels the task.
            with suppress(BrokenPipeError):
                self.report("alive")
        else:
            self._events[order].set()


async def run(arguments: WorkerArguments, pipe: Connection, graceful_exit_event: threading.Event) -> None:
    """Runs the worker until the order "close".

    graceful_exit_event: `run` sets this event when the worker has started. If the parent ends before that, the process
        is killed at once. If the parent ends later, the worker has some seconds to exit by itself.
    """
    parent = ParentPipe(pipe)
    try:
        service = await _start(arguments)
    except (ConfigError, EngineDeadError):
        # Report nothing: the engine reports this error to the parent.
        await parent.wait("close")
        return
    except (nanovllm_models.ModelError, VocabularyError) as error:
        parent.report(StartFailure(str(error), is_user_error=True))
        await parent.wait("close")
        return
    # Exclude the loaded objects from garbage collection: they live until the worker exits.
    gc.collect()
    gc.freeze()
    graceful_exit_event.set()
    parent.report("ready")
    try:
        await parent.wait("open")
        await _serve(service, arguments, parent)
    finally:
        service.renderer.close()
        await service.engine.stop()


async def _start(arguments: WorkerArguments) -> Service:
    settings = arguments.settings
    connect_task = asyncio.create_task(EngineClient.connect(arguments.engine))
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, arguments)
        vocabulary = TextVocabulary(tokenizer.backend)
        chat_format = select_chat_format(arguments, tokenizer.chat_template)
        model_format = ModelFormat(chat_format, vocabulary)
        renderer = Renderer(tokenizer, chat_format.tool_calls, chat_format.reasoning)
        if arguments.index == 0 and (messages := renderer.find_omitted_content()):
            get_logger("nanovllm").warning("chat template leaves out content", messages=messages)
        engine: Engine = await connect_task
    except BaseException:
        connect_task.cancel()
        await asyncio.wait((connect_task,))
        raise
    names = settings.model_names or (engine.info.model,)
    counters = SharedCounters(arguments.counters, arguments.index)
    return Service(
        engine=engine,
        renderer=renderer,
        vocabulary=vocabulary,
        model_format=model_format,
        model_names=names,
        admission=AdmissionControl(engine.info.max_num_seqs + settings.max_queue, counters),
        metrics=Metrics(
            names[0],
            engine.info,
            lambda: engine.stats,
            counters,
            prefix=settings.metrics_prefix,
            process_metrics=ProcessMetrics(counters, arguments.engine_pid),
        ),
        logger=get_logger("nanovllm"),
        api_keys=settings.api_keys,
        admin_api_key=settings.admin_api_key,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
        max_body_bytes=settings.max_body_bytes,
        body_memory_bytes=settings.body_memory_bytes,
        request_timeout_s=settings.request_timeout_s,
        log_prompts=settings.log_prompts,
        allow_priority=settings.allow_priority,
        transfer=settings.transfer,
        defaults=arguments.defaults,
    )


def _load_tokenizer(arguments: WorkerArguments) -> nanovllm_models.Tokenizer:
    tokenizer = nanovllm_models.load_tokenizer(arguments.model, chat_template=arguments.template)
    if arguments.rings is not None:
        num_token_ids = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        tokenizer.share_encodings(RingEncodingExchange(arguments.rings, arguments.index, num_token_ids))
    return tokenizer


def select_chat_format(arguments: WorkerArguments, template: str) -> nanovllm_models.ChatFormat:
    """Returns the formats that the settings name; if a setting is None, the template's format. Raises ModelError."""
    detected = nanovllm_models.read_chat_format(arguments.model, template)
    reasoning, tool_calls = arguments.settings.reasoning_parser, arguments.settings.tool_call_parser
    # The setting "none" is not a key of these tables, so `get` returns None, which means no format.
    return nanovllm_models.ChatFormat(
        detected.reasoning if reasoning is None else REASONING_FORMATS.get(reasoning),
        detected.tool_calls if tool_calls is None else TOOL_CALL_FORMATS.get(tool_calls),
    )


async def _serve(service: Service, arguments: WorkerArguments, parent: ParentPipe) -> None:
    drain_task = asyncio.create_task(_drain(service, parent))
    lag_task = asyncio.create_task(measure_loop_lag(service.metrics.event_loop_lag.observe))
    memory_task = asyncio.create_task(_return_memory_regularly())

    async def wait_for_close() -> None:
        await parent.wait("close")
        for generation in tuple(service.running):
            generation.fail(unavailable(SHUTDOWN_REASON, "draining"))

    try:
        app = cast(ASGIFramework, create_app(service))
        await serve(app, arguments.listener, make_hypercorn_config(), wait_for_close)
    finally:
        tasks = (drain_task, lag_task, memory_task)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _drain(service: Service, parent: ParentPipe) -> None:
    await parent.wait("drain")
    service.admission.shutdown_reason = SHUTDOWN_REASON
    await service.admission.idle.wait()
    parent.report("drained")


async def _return_memory_regularly() -> None:
    """Returns freed memory of large bodies and prompts to the system. malloc alone would keep more than 100 MB."""
    while True:
        await asyncio.sleep(MEMORY_RETURN_INTERVAL_S)
        await asyncio.to_thread(return_freed_memory)


def make_hypercorn_config() -> Config:
    """Returns the settings of Hypercorn."""
    error_logger = logging.getLogger("hypercorn.error")
    error_logger.setLevel(logging.WARNING)
    config = Config()
    config.errorlog = error_logger
    config.keep_alive_timeout = IDLE_TIMEOUT_S
    config.graceful_timeout = CLOSE_TIMEOUT_S
    config.include_server_header = False
    # Maximum number of received parts of a request's body that the application has not read yet.
    config.max_app_queue_size = 1
    return config
