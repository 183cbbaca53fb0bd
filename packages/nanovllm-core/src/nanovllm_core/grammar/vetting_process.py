"""Runs the vetting process, which forks a child per grammar and kills children that take too long.

An inherited socket connects this process to the engine. This process must stay single-threaded, because it forks.
"""

import contextlib
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import msgspec

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.compiler import Compiler, write_rules
from nanovllm_core.grammar.mask_times import TrialCompiler
from nanovllm_core.grammar.schema_enforcement import convert_grammar
from nanovllm_core.grammar.vetting import DIED, FAILED, OUT_OF_TIME, PASSED, REFUSED, VettingSetup, receive_message
from nanovllm_core.grammar_types import GrammarSpec
from nanovllm_core.stop_signals import ignore_stop_signals

# Niceness of the children, so that serving has priority.
_NICE = 5
# Maps exit codes of children to verdicts. Other exit codes mean DIED or OUT_OF_TIME.
_VERDICTS = {0: PASSED, 1: REFUSED, 3: FAILED}
_DIED_EXIT_CODE = 2  # exit code of a child whose memory or stack was too small


@dataclass(frozen=True, slots=True)
class VettingChild:
    """A child process that compiles one grammar.

    deadline: time at which the child is killed, on the clock `time.monotonic`.
    reply_fd: descriptor of the reply. The child writes its result, then the vetting process writes the verdict.
    """

    deadline: float
    reply_fd: int


def main() -> None:
    """Answer requests on the socket whose descriptor is the program's argument, until the engine closes its end."""
    ignore_stop_signals()
    signal.signal(signal.SIGCHLD, _ignore_signal)
    # Every signal writes a byte to this pipe, so that `poll` returns when a child ends.
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    with socket.socket(fileno=int(sys.argv[1])) as engine:
        # Import xgrammar while the engine reads the vocabulary.
        import_module("xgrammar")

        if (setup_message := receive_message(engine)) is None:
            return
        setup = msgspec.msgpack.decode(setup_message[0], type=VettingSetup)
        compiler = Compiler(setup.tokens, setup.end_ids, setup.vocab_size)
        compiler.warm_up()
        trial_compiler = TrialCompiler(compiler, setup.tokens)
        # A child's garbage collection would copy all memory pages that it shares with this process.
        gc.freeze()
        children: dict[int, VettingChild] = {}
        try:
            _serve(engine, wakeup_read, setup, trial_compiler, children)
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
    # An ordinary exit takes a second, because torch is imported.
    os._exit(0)


def _ignore_signal(_signal: int, _frame: object) -> None:
    """Do nothing. The wakeup descriptor only works for signals with a handler."""


def _serve(
    engine: socket.socket,
    wakeup_read: int,
    setup: VettingSetup,
    trial_compiler: TrialCompiler,
    children: dict[int, VettingChild],
) -> None:
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    poll.register(wakeup_read, select.POLLIN)
    while True:
        next_deadline = min((child.deadline for child in children.values()), default=None)
        # Wait one millisecond longer, so that the deadline has passed when `poll` returns.
        timeout = None if next_deadline is None else max(next_deadline - time.monotonic(), 0) * 1000 + 1
        ready = {descriptor for descriptor, _ in poll.poll(timeout)}
        if wakeup_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup_read, 1 << 12)
        _send_verdicts(children)
        for pid, child in children.items():
            if child.deadline <= time.monotonic():
                os.kill(pid, signal.SIGKILL)
        if engine.fileno() in ready:
            if (message := receive_message(engine)) is None:
                return
            payload, (reply_fd,) = message
            pid = os.fork()
            if pid == 0:
                # Close the copies of other replies' descriptors: the engine reads a reply until all copies are closed.
                for child in children.values():
                    os.close(child.reply_fd)
                _compile_and_exit(trial_compiler, payload, setup, reply_fd)
            children[pid] = VettingChild(time.monotonic() + setup.max_wall_seconds, reply_fd)


def _send_verdicts(children: dict[int, VettingChild]) -> None:
    for pid in tuple(children):
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if not ended_pid:
            continue
        child = children.pop(pid)
        exit_code = os.waitstatus_to_exitcode(status)
        if (verdict := _VERDICTS.get(exit_code)) is None:
            verdict = OUT_OF_TIME if child.deadline <= time.monotonic() or exit_code == -signal.SIGXCPU else DIED
        with contextlib.suppress(BrokenPipeError):
            os.write(child.reply_fd, verdict)
        os.close(child.reply_fd)


def _compile_and_exit(trial_compiler: TrialCompiler, payload: bytes, setup: VettingSetup, reply_fd: int) -> None:
    """Convert, compile and time a grammar in the child process, write the result to `reply_fd`, and exit."""
    exit_code = _DIED_EXIT_CODE
    try:
        os.nice(_NICE)
        seconds = math.ceil(setup.max_seconds)
        # The signal at the first limit, SIGXCPU, tells the parent the cause.
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (address_space := _address_space()) is not None:
            limit = address_space + setup.max_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # Warnings of the C++ code quote the grammars of clients: keep them out of the engine's log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        spec = msgspec.msgpack.decode(payload, type=GrammarSpec)
        enforceable = convert_grammar(spec)
        rules = write_rules(enforceable.spec)
        trial_compiler.check(enforceable.spec, rules)
        _write_reply(reply_fd, msgspec.structs.replace(enforceable, rules=rules))
        exit_code = 0
    except GrammarError as error:
        if "bad_alloc" not in error.message:  # If memory ran out, keep the exit code: the verdict is DIED.
            _write_reply(reply_fd, error.args)
            exit_code = 1
    except (MemoryError, RecursionError):
        pass  # The verdict is DIED.
    except Exception as error:  # noqa: BLE001 (the engine raises an error that names it)
        _write_reply(reply_fd, (f"{type(error).__name__}: {error}", traceback.format_exc()))
        exit_code = 3
    finally:
        os._exit(exit_code)


def _write_reply(reply_fd: int, reply: object) -> None:
    with open(reply_fd, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(reply))


def _address_space() -> int | None:
    """Size of this process's address space in bytes; None on systems without /proc."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[0]) * resource.getpagesize() if path.exists() else None
