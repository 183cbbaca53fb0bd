"""The process that tries grammars: it forks a child for each, and kills those that take too long.

A socket, inherited, leads to the engine's process; see `vetting`. It never has more than one thread, as it forks.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import msgspec

from nanovllm_core.grammar.compiler import Compiler
from nanovllm_core.grammar.vetting import DIED, PASSED, REFUSED, TOO_LONG, Setup, receive_message
from nanovllm_core.request import GrammarError, GrammarSpec

# Compiling gives way to serving.
_NICE = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """A child that tries a grammar: when its time is up, and where the verdict goes."""

    deadline: float
    verdict: int


def main() -> None:
    """Serve the socket whose descriptor is the one argument until its other end is closed."""
    # They reach the whole foreground group; this process ends with the engine's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _notice)
    # A byte for each signal, so that waiting for the next grammar ends when a child does.
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    with socket.socket(fileno=int(sys.argv[1])) as engine:
        # While the engine reads its vocabulary.
        import_module("xgrammar")

        if (first := receive_message(engine)) is None:
            return
        setup = msgspec.msgpack.decode(first[0], type=Setup)
        compiler = Compiler(setup.tokens, setup.end_ids, setup.vocab_size)
        compiler.warm()
        trials: dict[int, Trial] = {}
        try:
            _serve(engine, woken, setup, compiler, trials)
        finally:
            for pid in trials:
                os.kill(pid, signal.SIGKILL)
    # Nothing is left to write, and torch takes a second to go.
    os._exit(0)


def _notice(_signal: int, _frame: object) -> None:
    """What the wakeup descriptor needs: a handler, whatever it does."""


def _serve(engine: socket.socket, woken: int, setup: Setup, compiler: Compiler, trials: dict[int, Trial]) -> None:
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        next_deadline = min((trial.deadline for trial in trials.values()), default=None)
        # Rounded up, so that the deadline has passed by then.
        timeout = None if next_deadline is None else max(next_deadline - time.monotonic(), 0) * 1000 + 1
        ready = {descriptor for descriptor, _ in poll.poll(timeout)}
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 12)
        _reap(trials)
        for pid, trial in trials.items():
            if trial.deadline <= time.monotonic():
                os.kill(pid, signal.SIGKILL)
        if engine.fileno() in ready:
            if (message := receive_message(engine)) is None:
                return
            payload, (verdict,) = message
            pid = os.fork()
            if pid == 0:
                # Whoever waits for another verdict reads until nobody can write to it.
                for trial in trials.values():
                    os.close(trial.verdict)
                _try(compiler, msgspec.msgpack.decode(payload, type=GrammarSpec), setup, verdict)
            trials[pid] = Trial(time.monotonic() + setup.max_seconds, verdict)


def _reap(trials: dict[int, Trial]) -> None:
    for pid in tuple(trials):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        trial = trials.pop(pid)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code == 0:
            said = PASSED
        elif exit_code == 1:
            said = REFUSED
        else:
            said = TOO_LONG if trial.deadline <= time.monotonic() or exit_code == -signal.SIGXCPU else DIED
        with contextlib.suppress(BrokenPipeError):
            os.write(trial.verdict, said)
        os.close(trial.verdict)


def _try(compiler: Compiler, spec: GrammarSpec, setup: Setup, verdict: int) -> None:
    """In the child: compile, say what is wrong if something is, and end."""
    exit_code = 2
    try:
        os.nice(_NICE)
        seconds = int(setup.max_seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (address_space := _address_space()) is not None:
            most = address_space + setup.max_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # What C++ warns of would fill the engine's log with what its users write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        compiler.compile(spec)
        exit_code = 0
    except GrammarError as error:
        if "bad_alloc" not in str(error):
            os.write(verdict, str(error).encode())
            exit_code = 1
    finally:
        os._exit(exit_code)


def _address_space() -> int | None:
    """Bytes of this process's address space; None where the system doesn't say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[0]) * resource.getpagesize() if path.exists() else None
