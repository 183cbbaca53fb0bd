"""The program of the vetting process: forks a child per grammar, and kills children that take too long.

An inherited socket connects it to the engine's process, see `vetting`. It must stay single-threaded, because it forks.
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

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.compiler import Compiler
from nanovllm_core.grammar.schema_enforcement import convert_grammar
from nanovllm_core.grammar.vetting import DIED, PASSED, REFUSED, TOO_LONG, Setup, receive_message
from nanovllm_core.grammar_types import GrammarSpec

# Niceness of the children, so that serving has priority.
_NICE = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """A child that compiles a grammar until `deadline` (`time.monotonic`); the verdict is written to `reply_fd`."""

    deadline: float
    reply_fd: int


def main() -> None:
    """Serve the socket whose descriptor is the only argument, until its other end is closed."""
    # Terminals and service managers send these signals to all processes. This process ends with the engine's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _ignore_signal)
    # Every signal writes a byte to this pipe, so that `poll` returns when a child ends.
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    with socket.socket(fileno=int(sys.argv[1])) as engine:
        # Import while the engine reads its vocabulary.
        import_module("xgrammar")

        if (first := receive_message(engine)) is None:
            return
        setup = msgspec.msgpack.decode(first[0], type=Setup)
        compiler = Compiler(setup.tokens, setup.end_ids, setup.vocab_size)
        compiler.warm()
        trials: dict[int, Trial] = {}
        try:
            _serve(engine, wakeup_read, setup, compiler, trials)
        finally:
            for pid in trials:
                os.kill(pid, signal.SIGKILL)
    # Nothing is left to write, and an ordinary exit takes a second with torch.
    os._exit(0)


def _ignore_signal(_signal: int, _frame: object) -> None:
    """Do nothing. The wakeup descriptor only works for signals with a handler."""


def _serve(engine: socket.socket, wakeup_read: int, setup: Setup, compiler: Compiler, trials: dict[int, Trial]) -> None:
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    poll.register(wakeup_read, select.POLLIN)
    while True:
        next_deadline = min((trial.deadline for trial in trials.values()), default=None)
        # One millisecond more, so that the deadline has passed when `poll` returns.
        timeout = None if next_deadline is None else max(next_deadline - time.monotonic(), 0) * 1000 + 1
        ready = {descriptor for descriptor, _ in poll.poll(timeout)}
        if wakeup_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup_read, 1 << 12)
        _reap(trials)
        for pid, trial in trials.items():
            if trial.deadline <= time.monotonic():
                os.kill(pid, signal.SIGKILL)
        if engine.fileno() in ready:
            if (message := receive_message(engine)) is None:
                return
            payload, (reply_fd,) = message
            pid = os.fork()
            if pid == 0:
                # Readers of the other replies wait until every copy of the descriptor is closed.
                for trial in trials.values():
                    os.close(trial.reply_fd)
                _compile_and_exit(compiler, msgspec.msgpack.decode(payload, type=GrammarSpec), setup, reply_fd)
            trials[pid] = Trial(time.monotonic() + setup.max_seconds, reply_fd)


def _reap(trials: dict[int, Trial]) -> None:
    for pid in tuple(trials):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        trial = trials.pop(pid)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code == 0:
            verdict = PASSED
        elif exit_code == 1:
            verdict = REFUSED
        else:
            verdict = TOO_LONG if trial.deadline <= time.monotonic() or exit_code == -signal.SIGXCPU else DIED
        with contextlib.suppress(BrokenPipeError):
            os.write(trial.reply_fd, verdict)
        os.close(trial.reply_fd)


def _compile_and_exit(compiler: Compiler, spec: GrammarSpec, setup: Setup, reply_fd: int) -> None:
    """Convert and compile in the child process, write the result or the error to `reply_fd`, and exit."""
    exit_code = 2
    try:
        os.nice(_NICE)
        seconds = int(setup.max_seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (address_space := _address_space()) is not None:
            limit = address_space + setup.max_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # Warnings of the C++ code quote the grammars of clients: keep them out of the engine's log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        enforceable = convert_grammar(spec)
        compiler.compile(enforceable.spec)
        _write_reply(reply_fd, enforceable)
        exit_code = 0
    except GrammarError as error:
        if "bad_alloc" not in error.message:
            _write_reply(reply_fd, error.args)
            exit_code = 1
    finally:
        os._exit(exit_code)


def _write_reply(reply_fd: int, reply: object) -> None:
    with open(reply_fd, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(reply))


def _address_space() -> int | None:
    """Bytes of this process's address space; None on systems without /proc."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[0]) * resource.getpagesize() if path.exists() else None
