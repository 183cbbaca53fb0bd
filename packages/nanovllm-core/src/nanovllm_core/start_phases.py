"""Logs the duration of each start-up phase."""

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def log_phase(name: str) -> Generator[None]:
    """Log the seconds of a phase if it succeeds. On a terminal, progress bars show the phases instead."""
    start_s = time.perf_counter()
    yield
    if not sys.stderr.isatty():
        _log.info("start-up phase %s took %.2f s", name, time.perf_counter() - start_s)
