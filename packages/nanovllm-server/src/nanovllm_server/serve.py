"""The life of the server process: bind, load, serve, drain, stop.

The port is taken first, so that a wrong one costs no model load, and opened last. This room must not know what is
served.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import cast

from hypercorn.asyncio import serve as serve_http
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

import nanovllm_models
from nanovllm_core import Engine, EngineClient, ModelSpec
from nanovllm_server import __version__
from nanovllm_server.admission import Gate
from nanovllm_server.app import create_app
from nanovllm_server.detokenize import Vocabulary
from nanovllm_server.observability.logs import get_logger
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.protocol.error import unavailable
from nanovllm_server.render import Renderer
from nanovllm_server.service import Service
from nanovllm_server.settings import Settings, SettingsError, read_template, sampling_defaults

BACKLOG = 2048
DRAIN_S = 30.0
CLOSE_S = 5.0
DEATH_GRACE_S = 3.0
WATCH_S = 0.25
# Longer than clients and proxies keep idle connections, so that they close them and never meet a closed one.
KEEP_ALIVE_S = 75


async def run(settings: Settings) -> int:
    """Serve until told to stop (SIGTERM, SIGINT) or the engine dies; returns the exit status.

    Raises SettingsError, ModelError, VocabularyError, ConfigError and EngineDeadError when the start fails.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with bind(settings.host, settings.port) as listener:
        starting = loop.create_task(_start(settings))
        if not await _before(starting, stop):
            return 0
        service = starting.result()
        try:
            return await _serve(service, listener, stop)
        finally:
            service.renderer.close()
            await service.engine.stop()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free one). Raises SettingsError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"can't listen on {host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SettingsError(f"can't listen on {host} port {port}: {error.strerror}") from error
    return listener


async def _before(starting: asyncio.Task[Service], stop: asyncio.Event) -> bool:
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done() and not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return False
    stopping.cancel()
    return True


async def _start(settings: Settings) -> Service:
    path, spec = await asyncio.to_thread(_find, settings)
    defaults = sampling_defaults(path, spec.vocab_size)
    template = None if settings.chat_template is None else read_template(settings.chat_template)
    launching = asyncio.create_task(EngineClient.launch(spec, settings.engine))
    try:
        # While the engine's process reads the weights.
        tokenizer = await asyncio.to_thread(nanovllm_models.load_tokenizer, path, chat_template=template)
        vocabulary = Vocabulary(tokenizer.backend)
        renderer = Renderer(tokenizer)
        engine: Engine = await launching
    except BaseException:
        launching.cancel()
        await asyncio.wait((launching,))
        raise
    names = settings.names or (spec.name,)
    return Service(
        engine=engine,
        renderer=renderer,
        vocabulary=vocabulary,
        names=names,
        gate=Gate(engine.info.max_num_seqs + settings.max_queue),
        metrics=Metrics(names[0], lambda: engine.stats),
        logger=get_logger("nanovllm"),
        api_key=settings.api_key,
        defaults=defaults,
    )


def _find(settings: Settings) -> tuple[Path, ModelSpec]:
    path = settings.model or nanovllm_models.default_model_path()
    return path, nanovllm_models.load(path, load_format=settings.load_format, seed=settings.engine.seed)


async def _serve(service: Service, listener: socket.socket, stop: asyncio.Event) -> int:
    address = listener.getsockname()
    listener.listen(BACKLOG)
    closing = asyncio.Event()
    server = asyncio.create_task(
        serve_http(cast(ASGIFramework, create_app(service)), _http_config(listener), shutdown_trigger=closing.wait)
    )
    # What was loaded stays: the collector need never look at it again.
    gc.collect()
    gc.freeze()
    sys.stdout.write(banner(service, address[0], address[1]))
    sys.stdout.flush()
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(_death(service.engine))
    try:
        await asyncio.wait((server, stopping, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            service.logger.error("engine died", reason=service.engine.dead)
            # Time for running requests to hear of it, and for whoever asks /health.
            await asyncio.wait((stopping,), timeout=DEATH_GRACE_S)
        else:
            await _drain(service, server, dying)
        closing.set()
        await asyncio.wait((server,), timeout=CLOSE_S)
        return 1 if service.engine.dead is not None else 0
    finally:
        for task in (server, stopping, dying):
            task.cancel()
        await asyncio.wait((server, stopping, dying))


async def _drain(service: Service, *ends: asyncio.Task[None]) -> None:
    service.gate.closed = "the server is shutting down"
    service.logger.info("draining", sequences=service.gate.active, seconds=DRAIN_S)
    emptied = asyncio.create_task(service.gate.empty.wait())
    await asyncio.wait((emptied, *ends), timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
    emptied.cancel()
    for generation in tuple(service.running):
        generation.fail(unavailable(service.gate.closed, "draining"))


async def _death(engine: Engine) -> None:
    # An engine's face has no event for it, and nothing else depends on how soon this is noticed.
    while engine.dead is None:  # noqa: ASYNC110
        await asyncio.sleep(WATCH_S)


def _http_config(listener: socket.socket) -> Config:
    errors = logging.getLogger("hypercorn.error")
    errors.setLevel(logging.WARNING)
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.errorlog = errors
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = CLOSE_S
    config.include_server_header = False
    return config


def banner(service: Service, host: str, port: int) -> str:
    """What the server says of itself once it serves, with a line to paste."""
    info = service.engine.info
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    url = f"http://{shown}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if service.api_key else ""
    return (
        f"nanovllm-server {__version__}\n"
        f"  address  {url}\n"
        f"  model    {', '.join(service.names)} ({info.dtype} on {info.device}, attention: {info.attention_backend})\n"
        f"  cache    {info.kv_cache_tokens} tokens ({info.kv_cache_bytes / (1 << 30):.2f} GiB), context "
        f"{info.max_model_len} tokens, {info.max_num_seqs} requests at once\n\n"
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{service.names[0]}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n'
    )
