import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from nanovllm_server.processes.server import handle_signals


@pytest.fixture(autouse=True)
def original_handlers() -> Iterator[None]:
    """Restores the handlers. A signal without a new handler does not end the test's process."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first_signal", [signal.SIGHUP, signal.SIGTERM])
async def test_a_signal_stops_the_server_and_only_sigterm_ends_the_drain(first_signal):
    stop, end_drain = asyncio.Event(), asyncio.Event()
    handle_signals(stop, end_drain)
    async with asyncio.timeout(60):
        os.kill(os.getpid(), first_signal)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGHUP)
        # The event loop handles signals in the order of their arrival.
        sighup_handled = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, sighup_handled.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await sighup_handled.wait()
        assert not end_drain.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await end_drain.wait()


async def test_an_ignored_sighup_remains_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handle_signals(asyncio.Event(), asyncio.Event())
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
