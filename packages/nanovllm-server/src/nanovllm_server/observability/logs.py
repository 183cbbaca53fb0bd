"""Configures logging. The log must never contain API keys. Only --log-prompts allows prompts in the log."""

import logging
import sys
from collections.abc import Callable
from typing import Literal

import orjson
import structlog
from structlog.types import EventDict, Processor

# Numba logs each instruction that it compiles. The HTTP libraries of huggingface_hub log each request.
VERBOSE_LIBRARIES = ("numba", "httpx", "httpx2")
LogFormat = Literal["text", "json"]
Logger = structlog.stdlib.BoundLogger


def configure_logs(log_format: LogFormat, level: str) -> None:
    """Writes the logs of structlog and of the standard library to stderr."""
    shared_processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderers: list[Processor]
    if log_format == "json":
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_dumps)]
    else:
        # The default formatter would show local variables, which contain conversations and keys.
        plain_traceback = structlog.dev.plain_traceback
        renderers = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain_traceback)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared_processors,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in VERBOSE_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared_processors,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=Logger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> Logger:
    """Returns the logger called `name`."""
    return structlog.stdlib.get_logger(name)


def _dumps(event: EventDict, default: Callable[[object], object], **_: object) -> str:
    return orjson.dumps(event, default=default).decode()
