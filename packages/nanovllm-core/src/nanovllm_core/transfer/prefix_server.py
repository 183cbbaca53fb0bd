"""Serves the entries of this engine's host memory to other engines."""

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
import zmq.asyncio
import zmq.auth.asyncio

from nanovllm_core.cache.checksum import checksum_of
from nanovllm_core.cache.host_memory import MARKER_BYTES, EntryKind, HostMemory
from nanovllm_core.errors import ConfigError
from nanovllm_core.transfer.leases import LeaseTable, LeaseUpdate
from nanovllm_core.transfer.messages import (
    MALFORMED_MESSAGE_ERRORS,
    PROTOCOL_VERSION,
    Entries,
    Fetch,
    FetchEnd,
    Hello,
    Received,
    Refused,
    RemoteMemory,
    ResetPrefixCache,
    ToClient,
    ToServer,
    Welcome,
    decode_to_server,
    encode,
    find_difference,
)
from nanovllm_core.transfer.nixl import NixlAgent
from nanovllm_core.transfer.secret import TransferKeys
from nanovllm_core.transfer.sockets import endpoint_of, make_socket

# A lease ends when its client has sent no Hello with the fetch's key for this many seconds.
LEASE_S = 3.0
# A client that sends no Hello for this time must send Hello again before other messages.
CLIENT_TIMEOUT_S = 10.0
NUM_CHECKSUM_THREADS = 4
SERVE_READS_INTERVAL_S = 0.001  # see `NixlAgent.serve_reads`

# Makes the engine's thread call a function, and does not wait for the call.
RunOnEngineThread = Callable[[Callable[[], object]], None]


@dataclass(slots=True, eq=False)
class _ClientLease:
    """The lease of a client's fetch. expiry_s: value of `time.monotonic` when the lease ends."""

    number: int
    client: bytes
    fetch: Fetch
    expiry_s: float


class PrefixServer:
    """The server for other engines. Call methods on the event loop's thread, except `publish`.

    address: HOST:PORT or ipc:///PATH to bind. Raises ConfigError if this is impossible.
    """

    def __init__(
        self,
        address: str,
        keys: TransferKeys,
        identity: dict[str, str],
        memory: HostMemory,
        agent: NixlAgent | None,
        leases: LeaseTable,
        run_on_engine_thread: RunOnEngineThread,
    ):
        self.engine_id = secrets.token_hex(8)
        self._identity = identity
        self._memory = memory
        self._agent = agent
        self._is_serving_reads = False
        self._lease_table = leases
        self._run_on_engine_thread = run_on_engine_thread
        self._memory_description = _describe_memory(memory, agent)
        self._executor = ThreadPoolExecutor(NUM_CHECKSUM_THREADS, "nanovllm-checksums")
        # Both dicts hold all leases.
        self._lease_by_client_and_key: dict[tuple[bytes, int], _ClientLease] = {}
        self._lease_by_number: dict[int, _ClientLease] = {}
        self._lease_numbers = itertools.count()
        # Time of the last Hello of each accepted client.
        self._hello_s: dict[bytes, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._event_loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _ClientKeyCheck(keys.client_keys.public))
        self._socket = make_socket(self._context, zmq.ROUTER, keys.server_keys)
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(endpoint_of(address))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"transfer_listen is {address}, where the engine can't listen: {error}") from error
        self.address = _bound_address(address, self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._start_task(self._receive())
        self._start_task(self._close_expired_leases())

    def close(self) -> None:
        """Close the socket. Clients then compute the missing entries."""
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()
        self._executor.shutdown(wait=False)

    def publish(self, updates: list[LeaseUpdate]) -> None:
        """Send updates to the clients. Called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # The event loop has ended.
            self._event_loop.call_soon_threadsafe(self._start_sending, updates)

    def _start_sending(self, updates: list[LeaseUpdate]) -> None:
        for update in updates:
            self._start_task(self._send_update(update))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._event_loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_update(self, update: LeaseUpdate) -> None:
        if (lease := self._lease_by_number.get(update.number)) is None:
            return
        fetch = lease.fetch
        slots = [self._memory.slot(EntryKind(fetch.entries[entry.position][0]), entry.slot) for entry in update.entries]
        checksums = await self._event_loop.run_in_executor(self._executor, _checksums_of, slots)
        # If the lease has ended meanwhile, send nothing: the checksums may come from other entries in its former slots.
        if update.number not in self._lease_by_number:
            return
        if update.entries:
            entries = [
                entry._replace(checksum=checksum) for entry, checksum in zip(update.entries, checksums, strict=True)
            ]
            payloads = slots if fetch.carrier == "tcp" else ()
            self._send(lease.client, Entries(fetch.key, entries, update.serve_s), payloads)
        if update.num_missing is not None:
            num_sent = len(fetch.entries) - update.num_missing
            self._send(lease.client, FetchEnd(fetch.key, num_sent, update.serve_s))

    def _send(self, client: bytes, message: ToClient, payloads: "list[memoryview] | tuple[()]" = ()) -> None:
        # The socket has no high-water mark, so it queues the message at once.
        sending = asyncio.ensure_future(self._socket.send_multipart([client, encode(message), *payloads], copy=False))
        error = sending.exception() if sending.done() else None
        if isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
            self._drop_client(client)

    def _drop_client(self, client: bytes) -> None:
        self._hello_s.pop(client, None)
        for lease in [lease for lease in self._lease_by_number.values() if lease.client == client]:
            self._close_lease(lease)

    def _close_lease(self, lease: _ClientLease) -> None:
        del self._lease_by_client_and_key[lease.client, lease.fetch.key]
        del self._lease_by_number[lease.number]
        self._run_on_engine_thread(partial(self._lease_table.close, lease.number))

    async def _receive(self) -> None:
        while True:
            client, *frames = await self._socket.recv_multipart()
            try:
                message = decode_to_server(frames[0])
            except (*MALFORMED_MESSAGE_ERRORS, IndexError):
                self._send(client, Refused("a message can't be read"))
                continue
            self._handle(client, message)
            # While messages are queued, `recv_multipart` does not let other tasks run.
            await asyncio.sleep(0)

    def _handle(self, client: bytes, message: ToServer) -> None:
        if isinstance(message, Hello):
            self._welcome(client, message)
        elif client not in self._hello_s:
            return  # This process may have started after the client's last Hello.
        elif isinstance(message, ResetPrefixCache):
            self._run_on_engine_thread(self._lease_table.reset_prefix_cache)
        elif isinstance(message, Fetch):
            self._open_lease(client, message)
        elif (lease := self._lease_by_client_and_key.get((client, message.key))) is None:
            return
        elif isinstance(message, Received):
            self._run_on_engine_thread(partial(self._lease_table.release, lease.number, message.positions))
        else:
            self._close_lease(lease)

    def _welcome(self, client: bytes, hello: Hello) -> None:
        difference = find_difference(self._identity, hello.identity)
        if hello.version != PROTOCOL_VERSION:
            difference = f"the protocol's version is {PROTOCOL_VERSION} here and {hello.version} there"
        if difference is not None:
            self._send(client, Refused(difference))
            return
        self._hello_s[client] = time.monotonic()
        leases = [
            lease for key in hello.keys if (lease := self._lease_by_client_and_key.get((client, key))) is not None
        ]
        for lease in leases:
            lease.expiry_s = time.monotonic() + LEASE_S
        self._send(client, Welcome(self.engine_id, self._memory_description, [lease.fetch.key for lease in leases]))

    def _open_lease(self, client: bytes, fetch: Fetch) -> None:
        """Serve a fetch. A repeated message changes nothing while the lease lasts."""
        if (client, fetch.key) in self._lease_by_client_and_key:
            return
        kinds = range(len(self._memory.layout.slot_bytes))
        has_valid_entries = all(kind in kinds for kind, _ in fetch.entries)
        if not has_valid_entries or len(fetch.prompt_ids) % 4:
            self._send(client, FetchEnd(fetch.key, 0, 0.0))
            return
        number = next(self._lease_numbers)
        lease = _ClientLease(number, client, fetch, time.monotonic() + LEASE_S)
        self._lease_by_client_and_key[client, fetch.key] = self._lease_by_number[number] = lease
        self._run_on_engine_thread(partial(self._lease_table.open, number, fetch))
        if fetch.carrier == "nixl" and self._agent is not None and not self._is_serving_reads:
            self._is_serving_reads = True
            self._start_task(self._serve_reads(self._agent))

    async def _serve_reads(self, agent: NixlAgent) -> None:
        """Let clients read the memory until no lease needs NIXL."""
        try:
            while any(lease.fetch.carrier == "nixl" for lease in self._lease_by_number.values()):
                agent.serve_reads()
                await asyncio.sleep(SERVE_READS_INTERVAL_S)
        finally:
            self._is_serving_reads = False

    async def _close_expired_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            now_s = time.monotonic()
            for client in [client for client, hello_s in self._hello_s.items() if now_s - hello_s > CLIENT_TIMEOUT_S]:
                self._drop_client(client)
            for lease in [lease for lease in self._lease_by_number.values() if lease.expiry_s < now_s]:
                self._close_lease(lease)


class _ClientKeyCheck:
    """Accepts clients with one public key. See `zmq.auth.Authenticator.configure_curve_callback`."""

    def __init__(self, key: bytes):
        self._key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._key


def _bound_address(address: str, endpoint: str) -> str:
    """`address`, with the port of the bound `endpoint` instead of port 0."""
    host, _, _ = address.rpartition(":")
    return address if address.startswith("ipc://") else f"{host}:{endpoint.rpartition(':')[2]}"


def _describe_memory(memory: HostMemory, agent: NixlAgent | None) -> RemoteMemory:
    """Describe the memory to clients, and write a new marker."""
    marker, start = secrets.token_bytes(MARKER_BYTES), memory.marker_offset
    memory.view[start : start + MARKER_BYTES] = marker
    nixl_metadata = b"" if agent is None else agent.metadata
    return RemoteMemory(
        os.getpid(), memory.descriptor, marker, start, len(memory.view), memory.offsets, memory.address, nixl_metadata
    )


def _checksums_of(slots: list[memoryview]) -> list[int]:
    return [checksum_of(slot) for slot in slots]
