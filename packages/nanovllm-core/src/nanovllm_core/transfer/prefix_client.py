"""Fetches entries from other engines. All calls come from the event loop's thread."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from nanovllm_core.cache.checksum import checksum_of
from nanovllm_core.cache.host_memory import HostMemory
from nanovllm_core.config import TransferCarrier
from nanovllm_core.transfer.carriers import Carrier, PeerCopy, make_carrier
from nanovllm_core.transfer.fetches import FetchOutcome, PrefixFetch
from nanovllm_core.transfer.messages import (
    MALFORMED_MESSAGE_ERRORS,
    PROTOCOL_VERSION,
    Cancel,
    Entries,
    Fetch,
    FetchEnd,
    Hello,
    Received,
    Refused,
    ResetPrefixCache,
    ToClient,
    ToServer,
    Welcome,
    decode_to_client,
    encode,
)
from nanovllm_core.transfer.nixl import CopyInProgressError, NixlAgent
from nanovllm_core.transfer.secret import TransferKeys
from nanovllm_core.transfer.sockets import endpoint_of, make_socket

HEARTBEAT_S = 0.5  # between two Hello messages
# A peer that sends nothing for this time is down. A fetch that the peer does not mention for this time is lost.
SILENCE_S = 2.0
CHECK_INTERVAL_S = 0.1
NUM_COPY_THREADS = 8
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _OpenFetch:
    """A fetch that has not ended. heard_s: when the peer mentioned the fetch for the last time.

    num_sent: number of entries that the peer sends; None until FetchEnd arrives.
    """

    fetch: PrefixFetch
    heard_s: float
    num_sent: int | None = None
    failed_positions: set[int] = field(default_factory=set[int])

    def record_serve_time(self, serve_s: float) -> None:
        """Record the time that a message states. Messages may be reordered, so the latest time counts."""
        self.fetch.peer_s = max(self.fetch.peer_s, serve_s)


class PeerConnection:
    """The connection to one engine.

    on_late_copies: called when copies end after the end of their fetch.
    """

    def __init__(
        self,
        address: str,
        keys: TransferKeys,
        identity: dict[str, str],
        memory: HostMemory,
        agent: NixlAgent | None,
        carrier: TransferCarrier,
        executor: ThreadPoolExecutor,
        on_end: Callable[[PrefixFetch], None],
        on_late_copies: Callable[[PrefixFetch, Sequence[int]], None],
    ):
        self._address = address
        self._identity = identity
        self._memory = memory
        self._agent = agent
        self._carrier_setting: TransferCarrier = carrier
        self._executor = executor
        self._on_end = on_end
        self._on_late_copies = on_late_copies
        self._engine_id = ""
        self._unusable_engine_id = ""  # engine_id of a peer that is not used until it is restarted
        self._carrier: Carrier | None = None  # None until the peer's Welcome, and while the peer is down
        self._heard_s = 0.0
        self._last_error = ""
        self._are_copies_failing = False
        self._must_reset = False  # whether the next Welcome must be answered with a reset
        self._fetches: dict[int, _OpenFetch] = {}
        self._context = zmq.asyncio.Context()
        self._socket = make_socket(self._context, zmq.DEALER, keys.client_keys)
        self._socket.curve_serverkey = keys.server_keys.public
        # Drop messages instead of queueing them for a peer that is not connected.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint_of(address))
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_task(self._receive())
        self._start_task(self._send_hellos())
        self._start_task(self._end_overdue_fetches())

    @property
    def is_ready(self) -> bool:
        """Whether fetches can start. Any thread may read this property."""
        return self._carrier is not None

    def start(self, fetch: PrefixFetch) -> None:
        """Start a fetch."""
        if self._carrier is None:
            self._end(fetch, FetchOutcome.PEER_DOWN)
            return
        request = fetch.request
        client_request = request.client_request
        message = Fetch(
            request.key,
            [(int(kind), block_hash) for kind, block_hash, _ in fetch.entries],
            client_request.prompt_ids.tobytes() if fetch.peer_computes else b"",
            client_request.cache_salt,
            client_request.priority,
            self._carrier.name,
        )
        self._fetches[request.key] = _OpenFetch(fetch, time.monotonic())
        self._send(message)

    def cancel(self, fetch: PrefixFetch, outcome: FetchOutcome) -> None:
        """End a fetch early. Does nothing if the fetch has already ended."""
        if self._fetches.pop(fetch.request.key, None) is not None:
            self._send(Cancel(fetch.request.key))
            self._end(fetch, outcome)

    def reset_prefix_cache(self) -> None:
        """Make the peer forget all entries, before the peer serves fetches that start later."""
        self._must_reset = not (self._engine_id and self._send(ResetPrefixCache()))

    def close(self) -> None:
        """Close the connection."""
        for task in self._tasks:
            task.cancel()
        if self._carrier is not None:
            self._carrier.close()
        self._socket.close()
        self._context.term()

    def _end(self, fetch: PrefixFetch, outcome: FetchOutcome) -> None:
        fetch.outcome, fetch.end_s = outcome, time.perf_counter()
        fetch.late_positions = frozenset(fetch.copying_positions)
        self._on_end(fetch)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, message: ToServer) -> bool:
        """Send a message. Returns False if the peer is not connected."""
        # Without a high-water mark, the message is queued at once.
        sending = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK))
        error = sending.exception() if sending.done() else None
        if error is not None and not isinstance(error, zmq.Again):
            raise error
        return error is None

    async def _send_hellos(self) -> None:
        while True:
            self._send(Hello(PROTOCOL_VERSION, self._identity, list(self._fetches)))
            await asyncio.sleep(HEARTBEAT_S)

    async def _end_overdue_fetches(self) -> None:
        """End fetches that the peer does not mention, and fetches that take too long."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now_s = time.monotonic()
            if self.is_ready and now_s - self._heard_s > SILENCE_S:
                self._mark_down(f"engine {self._address} does not answer; prompts are computed here until it does")
            for open_fetch in list(self._fetches.values()):
                fetch = open_fetch.fetch
                if time.perf_counter() - fetch.begin_s > fetch.limit_s:
                    self.cancel(fetch, FetchOutcome.TOO_SLOW)
                elif now_s - open_fetch.heard_s > SILENCE_S:
                    self.cancel(fetch, FetchOutcome.LOST)

    def _mark_down(self, error: str) -> None:
        """Stop using the peer until its next Welcome."""
        self._engine_id = ""
        if self._carrier is not None:
            # An ended process's memory must not stay mapped.
            self._carrier.close()
            self._carrier = None
        if error != self._last_error:
            self._last_error = error
            _log.warning("%s", error)
        for open_fetch in list(self._fetches.values()):
            self.cancel(open_fetch.fetch, FetchOutcome.LOST)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                message: ToClient = decode_to_client(frames[0].buffer)
            except MALFORMED_MESSAGE_ERRORS as error:
                self._mark_down(f"engine {self._address} sent an invalid message (is its version the same?): {error}")
                continue
            self._heard_s = time.monotonic()
            match message:
                case Welcome():
                    self._accept_welcome(message)
                case Refused(reason):
                    self._mark_down(f"engine {self._address} can't share KV blocks with this engine: {reason}")
                case Entries():
                    self._start_copies(message, [frame.buffer for frame in frames[1:]])
                case FetchEnd(key, num_sent, serve_s):
                    if (open_fetch := self._fetches.get(key)) is not None:
                        open_fetch.num_sent = num_sent
                        open_fetch.record_serve_time(serve_s)
                        self._end_if_complete(open_fetch)
            # While messages are queued, `recv_multipart` does not let other tasks run.
            await asyncio.sleep(0)

    def _accept_welcome(self, welcome: Welcome) -> None:
        if welcome.engine_id == self._unusable_engine_id:
            return
        if welcome.engine_id != self._engine_id:
            if self._engine_id:
                self._mark_down(f"engine {self._address} was restarted")
            carrier = make_carrier(self._carrier_setting, self._memory, welcome.memory, self._agent)
            if isinstance(carrier, str):
                self._unusable_engine_id = welcome.engine_id
                self._mark_down(
                    f"transfer_carrier {self._carrier_setting} can't reach engine {self._address}: {carrier}"
                )
                return
            self._carrier, self._engine_id, self._last_error = carrier, welcome.engine_id, ""
            _log.info("fetching KV blocks from engine %s by %s", self._address, carrier.name)
        if self._must_reset:
            self.reset_prefix_cache()
        for key in welcome.keys:
            if key in self._fetches:
                self._fetches[key].heard_s = time.monotonic()

    def _start_copies(self, message: Entries, payloads: Sequence[memoryview]) -> None:
        open_fetch, carrier = self._fetches.get(message.key), self._carrier
        if open_fetch is None or carrier is None:
            self._send(Cancel(message.key))
            return
        open_fetch.heard_s, fetch = time.monotonic(), open_fetch.fetch
        open_fetch.record_serve_time(message.serve_s)
        has_payloads = len(payloads) == len(message.entries)
        copies: list[PeerCopy] = []
        # Skip entries of a message that arrives twice. If their first copy failed, this engine computes the entries.
        known_positions = fetch.copying_positions | fetch.arrived_positions | open_fetch.failed_positions
        for index, entry in enumerate(message.entries):
            if 0 <= entry.position < len(fetch.entries) and entry.position not in known_positions:
                known_positions.add(entry.position)
                kind, _, target_slot = fetch.entries[entry.position]
                copies.append(PeerCopy(entry, kind, target_slot, payloads[index] if has_payloads else None))
        if copies:
            fetch.copying_positions.update(copy.entry.position for copy in copies)
            self._start_task(self._finish_copies(open_fetch, carrier, copies))

    async def _finish_copies(self, open_fetch: _OpenFetch, carrier: Carrier, copies: list[PeerCopy]) -> None:
        fetch = open_fetch.fetch
        copying = asyncio.get_running_loop().run_in_executor(
            self._executor, _copy_entries, self._memory, carrier, copies
        )
        try:
            intact_positions, error = await asyncio.shield(copying)
        except CopyInProgressError as stuck:
            # The slots stay held, also after the end of the fetch.
            _log.error("slots of host memory are lost, because a copy can't be stopped: %s", stuck)
            if carrier is self._carrier:
                # More copies from this peer could lose more slots.
                self._unusable_engine_id = self._engine_id
                self._mark_down(f"engine {self._address} is not used until it is restarted: {stuck}")
            return
        if error and not self._are_copies_failing:
            _log.warning(
                "the copy of KV blocks from engine %s failed; they are computed here: %s", self._address, error
            )
        self._are_copies_failing = bool(error)
        positions = [copy.entry.position for copy in copies]
        fetch.copying_positions.difference_update(positions)
        if self._fetches.get(fetch.request.key) is not open_fetch:
            self._on_late_copies(fetch, positions)
            return
        fetch.arrived_positions.update(intact_positions)
        open_fetch.failed_positions.update(set(positions) - intact_positions)
        fetch.positions_with_draft_entries.update(
            copy.entry.position for copy in copies if copy.entry.has_draft_entries
        )
        self._send(Received(fetch.request.key, positions))
        self._end_if_complete(open_fetch)

    def _end_if_complete(self, open_fetch: _OpenFetch) -> None:
        fetch = open_fetch.fetch
        num_ended = len(fetch.arrived_positions) + len(open_fetch.failed_positions)
        # Messages may be reordered, so FetchEnd may arrive before the last entries.
        num_sent = len(fetch.entries) if open_fetch.num_sent is None else open_fetch.num_sent
        if fetch.copying_positions or num_ended < num_sent:
            return
        del self._fetches[fetch.request.key]
        if len(fetch.arrived_positions) == len(fetch.entries):
            self._end(fetch, FetchOutcome.FETCHED)
        else:
            self._end(fetch, FetchOutcome.PARTLY if fetch.arrived_positions else FetchOutcome.NOTHING)


def _copy_entries(memory: HostMemory, carrier: Carrier, copies: Sequence[PeerCopy]) -> tuple[set[int], str]:
    """Copy entries. Returns the positions of the entries whose bytes are intact, and an error message or ""."""
    try:
        carrier.copy(copies)
    except CopyInProgressError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever the peer sent, the entries are computed)
        return set(), str(error)
    intact_positions = {
        copy.entry.position
        for copy in copies
        if checksum_of(memory.slot(copy.kind, copy.target_slot)) == copy.entry.checksum
    }
    return intact_positions, "" if len(intact_positions) == len(copies) else "checksums differ"
