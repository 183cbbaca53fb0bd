"""Vets each grammar in a child process, which converts and compiles the grammar within limits of time and memory.

The engine receives the converted grammar and compiles this grammar again, because serialising a compiled grammar takes
far longer than compiling.
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

from nanovllm_core.errors import GrammarError, GrammarErrorCode
from nanovllm_core.grammar.schema_enforcement import EnforceableGrammar
from nanovllm_core.grammar_types import GrammarSpec

if TYPE_CHECKING:
    from nanovllm_core.model import Vocabulary

# Limits on the CPU time, the wall-clock time and the additional memory of converting and compiling one grammar. On a
# busy machine, the wall-clock time is many times the CPU time.
MAX_SECONDS = 10.0
MAX_WALL_SECONDS = 60.0
MAX_BYTES = 512 << 20
# Maximum time for the vetting process to import torch, to receive a message, or to kill a child after the deadline.
_START_TIMEOUT_S = 60.0

# Verdicts on a grammar. Each reply of the vetting process ends with one of these bytes.
PASSED, REFUSED, OUT_OF_TIME, DIED, FAILED = b"+", b"-", b"t", b"x", b"!"
_HEADER = struct.Struct("<I")


class VettingSetup(msgspec.Struct, frozen=True):
    """The first message to the vetting process: the vocabulary and the limits. max_seconds limits the CPU time."""

    tokens: list[bytes]
    end_ids: tuple[int, ...]
    vocab_size: int
    max_seconds: float
    max_wall_seconds: float
    max_bytes: int


def send_message(connection: socket.socket, message: msgspec.Struct, descriptors: list[int]) -> None:
    """Send a message together with file descriptors."""
    payload = msgspec.msgpack.encode(message)
    socket.send_fds(connection, [_HEADER.pack(len(payload))], descriptors)
    connection.sendall(payload)


def receive_message(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """Returns (message, file descriptors); None if the connection was closed."""
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
    header += _receive(connection, _HEADER.size - len(header)) if header else b""
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    payload = _receive(connection, length)
    return (payload, list(descriptors)) if len(payload) == length else None


def _receive(connection: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length and (part := connection.recv(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class Vetter:
    """Owns the vetting process, and restarts it if it dies or hangs. Any thread may call the methods."""

    def __init__(self, read_vocabulary: "Callable[[], Vocabulary]", vocab_size: int):
        self._read_vocabulary = read_vocabulary
        self._vocab_size = vocab_size
        self._max_seconds, self._max_bytes = MAX_SECONDS, MAX_BYTES
        self._lock = threading.Lock()
        # The vetting process and the connection to it; None while no process runs.
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._is_set_up = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the vetting process; None while no process runs."""
        return None if self._running is None else self._running[0].pid

    def start(self) -> None:
        """Start the vetting process, which takes seconds."""
        with self._lock:
            self._start()

    def vet(self, spec: GrammarSpec) -> EnforceableGrammar:
        """Convert and compile a grammar in the vetting process, and wait for the reply.

        Raises: GrammarError. RuntimeError for an unexpected exception in the child process, with its traceback.
        """
        # A grammar can kill only the child process that compiles it (DIED). An empty reply means that the vetting
        # process itself died or hangs: try again.
        reply = self._request_reply(spec) or self._request_reply(spec)
        verdict = reply[-1:]
        if verdict == PASSED:
            return msgspec.msgpack.decode(reply[:-1], type=EnforceableGrammar)
        if verdict == REFUSED:
            raise GrammarError(*msgspec.msgpack.decode(reply[:-1], type=tuple[str, str | None, GrammarErrorCode]))
        if verdict == OUT_OF_TIME:
            raise GrammarError(
                f"this grammar takes more than {self._max_seconds:g} s to compile: make it smaller, or its "
                "repetitions shorter"
            )
        if verdict == DIED:
            raise GrammarError(
                f"this grammar takes more than {self._max_bytes >> 20} MiB to compile, or is nested too deeply: "
                "make it smaller, or its repetitions shorter"
            )
        if verdict == FAILED:
            summary, child_traceback = msgspec.msgpack.decode(reply[:-1], type=tuple[str, str])
            error = RuntimeError(summary)
            error.add_note(child_traceback)
            raise error
        raise GrammarError("the process that compiles grammars was stopped: try again")

    def _request_reply(self, spec: GrammarSpec) -> bytes:
        """The reply of the vetting process: message, then verdict; b"" if the process died or hangs."""
        read_end, write_end = os.pipe()
        try:
            try:
                process = self._send(spec, write_end)
            finally:
                os.close(write_end)
            reply = _read_all(read_end, time.monotonic() + _START_TIMEOUT_S + MAX_WALL_SECONDS)
        finally:
            os.close(read_end)
        if not reply:
            # The process has ended or hangs. The next call of `_send` starts a new process.
            process.kill()
            process.wait()
        return reply

    def close(self) -> None:
        """End the vetting process and its children."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _send(self, spec: GrammarSpec, reply_fd: int) -> subprocess.Popen[bytes]:
        """Send a grammar to the vetting process. Returns this process."""
        with self._lock:
            if self._is_closed:
                raise GrammarError("the engine was stopped")
            try:
                return self._try_to_send(spec, reply_fd)
            except OSError:
                # The vetting process has died or hangs: restart it.
                self._stop()
                return self._try_to_send(spec, reply_fd)

    def _try_to_send(self, spec: GrammarSpec, reply_fd: int) -> subprocess.Popen[bytes]:
        process, connection = self._running or self._start()
        if not self._is_set_up:
            tokens, end_ids = self._read_vocabulary()
            limits = self._max_seconds, MAX_WALL_SECONDS, self._max_bytes
            setup = VettingSetup(list(tokens), end_ids, self._vocab_size, *limits)
            # Sending megabytes blocks until the process has finished its imports.
            send_message(connection, setup, [])
            self._is_set_up = True
        send_message(connection, spec, [reply_fd])
        return process

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        connection, child_end = socket.socketpair()
        # If the process does not receive a message in time, sending raises TimeoutError, which is an OSError.
        connection.settimeout(_START_TIMEOUT_S)
        with child_end:
            # The process forks and must be single-threaded, but numpy's linear algebra would start threads.
            process = subprocess.Popen(  # noqa: S603 - our own code
                [sys.executable, "-c", _PROGRAM, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._running = process, connection
        self._is_set_up = False
        return self._running

    def _stop(self) -> None:
        if self._running is not None:
            process, connection = self._running
            self._running = None
            # When the connection closes, the process kills its children and ends.
            connection.close()
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_PROGRAM = "from nanovllm_core.grammar.vetting_process import main; main()"


def _read_all(descriptor: int, deadline: float) -> bytes:
    """Read until the other end is closed. Returns b"" if the deadline has passed."""
    data = b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        part = os.read(descriptor, 1 << 16)
        if not part:
            return data
        data += part
    return b""
