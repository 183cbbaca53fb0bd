"""Tries grammars where they can do no harm: in processes that are killed when they take too long or too much memory.

A compiled grammar could come back from there, but serialised it is up to fifty times as large and takes up to a hundred
times as long as compiling does (200 fields with enumerations: 31 ms, against 1.4 s and 44 MB). So only the verdict
comes back, and what passed is compiled again here, which takes what it took there.

One process imports and builds what all grammars need, once, and forks another for each. This room must not know what a
grammar means.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from nanovllm_core.request import GrammarError, GrammarSpec

if TYPE_CHECKING:
    from nanovllm_core.model import Vocabulary

# Of one grammar. It may take this long by the clock, and add this much to its process's memory.
MAX_SECONDS = 10.0
MAX_BYTES = 512 << 20
# For the process to start, which imports torch, and to notice that a child must be killed.
_START_SECONDS = 60.0

PASSED, REFUSED, TOO_LONG, DIED = b"+", b"-", b"t", b"x"
_HEADER = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True):
    """What the process is told first: the vocabulary and the limits."""

    tokens: list[bytes]
    end_ids: tuple[int, ...]
    vocab_size: int
    max_seconds: float
    max_bytes: int


def send_message(there: socket.socket, message: msgspec.Struct, descriptors: list[int]) -> None:
    """Send a message, and open files with it."""
    payload = msgspec.msgpack.encode(message)
    socket.send_fds(there, [_HEADER.pack(len(payload))], descriptors)
    there.sendall(payload)


def receive_message(there: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next message, and the files that came with it; None when there will be no more."""
    header, descriptors, _, _ = socket.recv_fds(there, _HEADER.size, 1)
    header += _receive(there, _HEADER.size - len(header)) if header else b""
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    payload = _receive(there, length)
    return (payload, list(descriptors)) if len(payload) == length else None


def _receive(there: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length and (part := there.recv(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class Vetter:
    """The process that tries grammars, started when there is one to try and again when it has died.

    Any thread may call it. It ends with this process, and when closed.
    """

    def __init__(self, vocabulary: "Callable[[], Vocabulary]", vocab_size: int):
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._max_seconds, self._max_bytes = MAX_SECONDS, MAX_BYTES
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._there: socket.socket | None = None
        self._is_set_up = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Have the process get ready, which takes seconds, and needs no vocabulary yet."""
        with self._lock:
            self._start()

    def vet(self, spec: GrammarSpec) -> None:
        """Try a grammar, and wait for the verdict. Raises GrammarError."""
        # Whoever killed the process, it was not this grammar.
        said = self._ask(spec) or self._ask(spec)
        verdict = said[-1:]
        if verdict == REFUSED:
            raise GrammarError(said[:-1].decode(errors="replace"))
        if verdict == TOO_LONG:
            raise GrammarError(
                f"this grammar takes more than {self._max_seconds:g} s to compile: make it smaller, or its "
                "repetitions shorter"
            )
        if verdict == DIED:
            raise GrammarError(
                f"this grammar takes more than {self._max_bytes >> 20} MiB to compile, or is nested too deeply: "
                "make it smaller, or its repetitions shorter"
            )
        if verdict != PASSED:
            raise GrammarError("the process that compiles grammars was stopped: try again")

    def _ask(self, spec: GrammarSpec) -> bytes:
        """What the process says of a grammar; b"" when it ended, or was ended, before it said anything."""
        ours, theirs = os.pipe()
        try:
            try:
                self._send(spec, theirs)
            finally:
                os.close(theirs)
            return _read_all(ours, time.monotonic() + _START_SECONDS + MAX_SECONDS)
        finally:
            os.close(ours)

    def close(self) -> None:
        """End the process, and with it whatever it tries."""
        with self._lock:
            self._closed = True
            self._stop()

    def _send(self, spec: GrammarSpec, theirs: int) -> None:
        with self._lock:
            if self._closed:
                raise GrammarError("the engine was stopped")
            try:
                self._send_to(self._there or self._start(), spec, theirs)
            except OSError:
                # It has died: nothing else closes the other end.
                self._stop()
                self._send_to(self._start(), spec, theirs)

    def _send_to(self, there: socket.socket, spec: GrammarSpec, theirs: int) -> None:
        if not self._is_set_up:
            tokens, end_ids = self._vocabulary()
            setup = Setup(list(tokens), end_ids, self._vocab_size, self._max_seconds, self._max_bytes)
            # Megabytes, which wait for the other end's imports. If it never reads, an OSError says so.
            there.settimeout(_START_SECONDS)
            send_message(there, setup, [])
            there.settimeout(None)
            self._is_set_up = True
        send_message(there, spec, [theirs])

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            # Single-threaded, as it forks: numpy's linear algebra would start threads.
            self._process = subprocess.Popen(  # noqa: S603 - our own code
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._there = ours
        self._is_set_up = False
        return ours

    def _stop(self) -> None:
        if self._there is not None:
            self._there.close()
            self._there = None
        if self._process is not None:
            # At the end of its input it kills its children and ends; while it still imports it has none.
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


_PROGRAM = "from nanovllm_core.grammar.vetting_process import main; main()"


def _read_all(descriptor: int, deadline: float) -> bytes:
    """Everything until the other end is closed, or the deadline has passed."""
    said = b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        said += part
    return said
