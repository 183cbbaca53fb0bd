"""One process that serves HTTP: from its start, over open and drain, to its end, as its parent orders.

It loads the tokenizer while the engine loads the model. This room must not know the other workers.
"""

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
from nanovllm_server.admission import Gate
from nanovllm_server.app import create_app
from nanovllm_server.connections import serve
from nanovllm_server.crew import Assignment, Failed, Order
from nanovllm_server.detokenize import Vocabulary
from nanovllm_server.dialect import Dialect
from nanovllm_server.encoding_exchange import EncodingExchange
from nanovllm_server.observability.logs import get_logger
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.protocol.error import unavailable
from nanovllm_server.render import Renderer
from nanovllm_server.service import Service
from nanovllm_server.shared import Sheet

CLOSE_S = 3.0
# Longer than clients and proxies keep idle connections, so that they close them and never meet a closed one. It is also
# what a client may take to send the head of a request.
KEEP_ALIVE_S = 75
SHUTTING_DOWN = "the server is shutting down"


class Orders:
    """The pipe to the parent: what it orders, and the end of everything when it is gone."""

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
        """Tell the parent."""
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


async def run(assignment: Assignment, pipe: Connection, serving: threading.Event) -> None:
    """Serve as ordered, until closed or alone.

    serving: set once the worker is ready, from when on it ends itself when its parent is gone.
    """
    orders = Orders(pipe)
    try:
        service = await _start(assignment)
    except (ConfigError, EngineDeadError):
        # The parent hears of it from the engine itself.
        await orders.wait("close")
        return
    except (nanovllm_models.ModelError, VocabularyError) as error:
        orders.report(Failed(str(error), expected=True))
        await orders.wait("close")
        return
    # What was loaded stays: the collector need never look at it again.
    gc.collect()
    gc.freeze()
    serving.set()
    orders.report("ready")
    try:
        await orders.wait("open")
        await _serve(service, assignment, orders)
    finally:
        service.renderer.close()
        await service.engine.stop()


async def _start(assignment: Assignment) -> Service:
    settings = assignment.settings
    connecting = asyncio.create_task(EngineClient.connect(assignment.engine))
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, assignment)
        vocabulary = Vocabulary(tokenizer.backend)
        form = chat_format(assignment, tokenizer.chat_template)
        dialect = Dialect(form, vocabulary)
        renderer = Renderer(tokenizer, form.tool_calls)
        engine: Engine = await connecting
    except BaseException:
        connecting.cancel()
        await asyncio.wait((connecting,))
        raise
    names = settings.names or (engine.info.model,)
    sheet = Sheet(assignment.numbers, assignment.index)
    return Service(
        engine=engine,
        renderer=renderer,
        vocabulary=vocabulary,
        dialect=dialect,
        names=names,
        gate=Gate(engine.info.max_num_seqs + settings.max_queue, sheet),
        metrics=Metrics(names[0], engine.info, lambda: engine.stats, sheet),
        logger=get_logger("nanovllm"),
        api_keys=settings.api_keys,
        max_body_bytes=settings.max_body_bytes,
        request_timeout_s=settings.request_timeout_s,
        log_prompts=settings.log_prompts,
        defaults=assignment.defaults,
    )


def _load_tokenizer(assignment: Assignment) -> nanovllm_models.Tokenizer:
    tokenizer = nanovllm_models.load_tokenizer(assignment.model, chat_template=assignment.template)
    if assignment.rings is not None:
        num_token_ids = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        tokenizer.share_encodings(EncodingExchange(assignment.rings, assignment.index, num_token_ids))
    return tokenizer


def chat_format(assignment: Assignment, template: str) -> nanovllm_models.ChatFormat:
    """What the model writes, given its chat template: as the settings say, else as it is. Raises ModelError."""
    found = nanovllm_models.find_format(assignment.model, template)
    # No table has "none".
    reasoning, calls = assignment.settings.reasoning_parser, assignment.settings.tool_call_parser
    return nanovllm_models.ChatFormat(
        found.reasoning if reasoning is None else REASONING_FORMATS.get(reasoning),
        found.tool_calls if calls is None else TOOL_CALL_FORMATS.get(calls),
    )


async def _serve(service: Service, assignment: Assignment, orders: Orders) -> None:
    draining = asyncio.create_task(_drain(service, orders))

    async def closed() -> None:
        await orders.wait("close")
        for generation in tuple(service.running):
            generation.fail(unavailable(SHUTTING_DOWN, "draining"))

    try:
        app = cast(ASGIFramework, create_app(service))
        await serve(app, assignment.listener, http_config(), closed)
    finally:
        draining.cancel()
        await asyncio.wait((draining,))


async def _drain(service: Service, orders: Orders) -> None:
    await orders.wait("drain")
    service.gate.closed = SHUTTING_DOWN
    await service.gate.empty.wait()
    orders.report("drained")


def http_config() -> Config:
    """Hypercorn's settings."""
    errors = logging.getLogger("hypercorn.error")
    errors.setLevel(logging.WARNING)
    config = Config()
    config.errorlog = errors
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = CLOSE_S
    config.include_server_header = False
    return config
