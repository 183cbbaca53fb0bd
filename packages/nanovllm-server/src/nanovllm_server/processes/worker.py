"""The life of a worker: it starts, serves HTTP, drains and ends when its parent orders so."""

import asyncio
import gc
import logging
import threading
from multiprocessing.connection import Connection
from typing import cast

from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

import nanovllm_models
from nanovllm_core import ConfigError, Engine, EngineClient, EngineDeadError
from nanovllm_models.chat_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from nanovllm_models.token_bytes import VocabularyError
from nanovllm_server.chat.admission import AdmissionControl
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.chat.service import Service
from nanovllm_server.http.app import create_app
from nanovllm_server.http.connections import serve
from nanovllm_server.observability.logs import get_logger
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.observability.shared_counters import SharedCounters
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.parsing.model_format import ModelFormat
from nanovllm_server.processes.encoding_exchange import RingEncodingExchange
from nanovllm_server.processes.worker_protocol import Order, StartFailure, WorkerArguments
from nanovllm_server.protocol.error import unavailable

CLOSE_S = 3.0
# Longer than clients and proxies keep idle connections, so that they close first and never use a closed one.
# It is also the time limit for the head of a request.
KEEP_ALIVE_S = 75
SHUTTING_DOWN = "the server is shutting down"


class ParentPipe:
    """The pipe to the parent. Receives its orders, and cancels the worker's task when the parent has ended."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._events: dict[Order, asyncio.Event] = {
            "open": asyncio.Event(),
            "drain": asyncio.Event(),
            "close": asyncio.Event(),
        }
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._loop.add_reader(pipe.fileno(), self._on_order)

    def report(self, report: object) -> None:
        """Send `report` to the parent."""
        self._pipe.send(report)

    async def wait(self, order: Order) -> None:
        """Wait until `order` has been given."""
        await self._events[order].wait()

    def _on_order(self) -> None:
        try:
            order: Order = self._pipe.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._pipe.fileno())
            if self._task is not None:
                self._task.cancel()
            return
        self._events[order].set()


async def run(arguments: WorkerArguments, pipe: Connection, serving: threading.Event) -> None:
    """Runs the worker until the order "close" or the end of the parent.

    serving: the worker sets it when it is ready; from then on it ends itself if the parent is gone.
    """
    parent = ParentPipe(pipe)
    try:
        service = await _start(arguments)
    except (ConfigError, EngineDeadError):
        # The parent gets this error from the engine itself.
        await parent.wait("close")
        return
    except (nanovllm_models.ModelError, VocabularyError) as error:
        parent.report(StartFailure(str(error), expected=True))
        await parent.wait("close")
        return
    # Loaded objects live until the end: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    serving.set()
    parent.report("ready")
    try:
        await parent.wait("open")
        await _serve(service, arguments, parent)
    finally:
        service.renderer.close()
        await service.engine.stop()


async def _start(arguments: WorkerArguments) -> Service:
    settings = arguments.settings
    connecting = asyncio.create_task(EngineClient.connect(arguments.engine))
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, arguments)
        vocabulary = TextVocabulary(tokenizer.backend)
        chat_format = select_chat_format(arguments, tokenizer.chat_template)
        model_format = ModelFormat(chat_format, vocabulary)
        renderer = Renderer(tokenizer, chat_format.tool_calls)
        engine: Engine = await connecting
    except BaseException:
        connecting.cancel()
        await asyncio.wait((connecting,))
        raise
    names = settings.names or (engine.info.model,)
    counters = SharedCounters(arguments.counters, arguments.index)
    return Service(
        engine=engine,
        renderer=renderer,
        vocabulary=vocabulary,
        model_format=model_format,
        names=names,
        admission=AdmissionControl(engine.info.max_num_seqs + settings.max_queue, counters),
        metrics=Metrics(names[0], engine.info, lambda: engine.stats, counters),
        logger=get_logger("nanovllm"),
        api_keys=settings.api_keys,
        max_body_bytes=settings.max_body_bytes,
        request_timeout_s=settings.request_timeout_s,
        log_prompts=settings.log_prompts,
        defaults=arguments.defaults,
    )


def _load_tokenizer(arguments: WorkerArguments) -> nanovllm_models.Tokenizer:
    tokenizer = nanovllm_models.load_tokenizer(arguments.model, chat_template=arguments.template)
    if arguments.rings is not None:
        num_token_ids = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        tokenizer.share_encodings(RingEncodingExchange(arguments.rings, arguments.index, num_token_ids))
    return tokenizer


def select_chat_format(arguments: WorkerArguments, template: str) -> nanovllm_models.ChatFormat:
    """The model's chat format: the parsers that the settings name, else those found for its template.

    Raises ModelError.
    """
    found = nanovllm_models.find_format(arguments.model, template)
    # "none" is in no table, so that `get` returns None.
    reasoning, calls = arguments.settings.reasoning_parser, arguments.settings.tool_call_parser
    return nanovllm_models.ChatFormat(
        found.reasoning if reasoning is None else REASONING_FORMATS.get(reasoning),
        found.tool_calls if calls is None else TOOL_CALL_FORMATS.get(calls),
    )


async def _serve(service: Service, arguments: WorkerArguments, parent: ParentPipe) -> None:
    draining = asyncio.create_task(_drain(service, parent))

    async def closed() -> None:
        await parent.wait("close")
        for generation in tuple(service.running):
            generation.fail(unavailable(SHUTTING_DOWN, "draining"))

    try:
        app = cast(ASGIFramework, create_app(service))
        await serve(app, arguments.listener, http_config(), closed)
    finally:
        draining.cancel()
        await asyncio.wait((draining,))


async def _drain(service: Service, parent: ParentPipe) -> None:
    await parent.wait("drain")
    service.admission.closed = SHUTTING_DOWN
    await service.admission.empty.wait()
    parent.report("drained")


def http_config() -> Config:
    """The settings for Hypercorn."""
    errors = logging.getLogger("hypercorn.error")
    errors.setLevel(logging.WARNING)
    config = Config()
    config.errorlog = errors
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = CLOSE_S
    config.include_server_header = False
    return config
