"""Copies entries (KV blocks and state checkpoints) from a peer's host memory to this engine's host memory."""

import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanovllm_core.cache.host_memory import EntryKind, HostMemory
from nanovllm_core.config import TransferCarrier
from nanovllm_core.transfer.messages import ReadyEntry, RemoteMemory
from nanovllm_core.transfer.nixl import NixlAgent
from nanovllm_core.transfer.sockets import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)


class TransferError(Exception):
    """A copy failed. The entries are then computed."""


class PeerCopy(NamedTuple):
    """One entry to copy from a peer. target_slot: slot in the memory of this engine.

    payload: the entry's bytes if the connection carries them, else None.
    """

    entry: ReadyEntry
    kind: EntryKind
    target_slot: int
    payload: memoryview | None


class Carrier(ABC):
    """Copies entries."""

    name: TransferCarrier

    @abstractmethod
    def copy(self, copies: Sequence[PeerCopy]) -> None:
        """Copy entries. Runs on any thread. Ends when no copy is in progress, unless it raises CopyInProgressError.

        Raises TransferError if a copy fails, and CopyInProgressError if a copy fails or takes too long and can't be
        stopped. The target slots of a copy in progress must never be used again.
        """

    def close(self) -> None:
        """Release the carrier's own resources, if it has any. A copy in progress ends first."""
        return


class TcpCarrier(Carrier):
    """The connection between the engines carries the entries."""

    name = "tcp"

    def __init__(self, memory: HostMemory):
        self._memory = memory

    def copy(self, copies: Sequence[PeerCopy]) -> None:
        """See `Carrier.copy`."""
        for _, kind, target_slot, payload in copies:
            target = self._memory.slot(kind, target_slot)
            if payload is None or payload.nbytes != target.nbytes:
                raise TransferError("a message lacks bytes of an entry")
            _copy_bytes(payload, target)


class SharedMemoryCarrier(Carrier):
    """Maps the memory of a peer on the same host. Raises OSError if this is impossible."""

    name = "shm"

    def __init__(self, memory: HostMemory, remote: RemoteMemory):
        self._memory = memory
        self._offsets = remote.offsets
        # Linux lets processes of the same user and PID namespace open this path. In another PID namespace, the path may
        # name an unrelated file, pipe or terminal.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(f"/proc/{remote.pid}/fd/{remote.descriptor}", flags)
        try:
            if os.fstat(descriptor).st_size != remote.num_bytes:
                raise OSError("the file descriptor of the peer's memory belongs to another file")
            self._view = memoryview(mmap.mmap(descriptor, remote.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
        finally:
            os.close(descriptor)
        marker_end = remote.marker_offset + len(remote.marker)
        if bytes(self._view[remote.marker_offset : marker_end]) != remote.marker:
            raise OSError("the file descriptor shows the memory of another engine (its marker differs)")

    def copy(self, copies: Sequence[PeerCopy]) -> None:
        """See `Carrier.copy`."""
        for entry, kind, target_slot, _ in copies:
            target = self._memory.slot(kind, target_slot)
            start = self._offsets[kind] + (entry.slot - 1) * target.nbytes
            source = self._view[start : start + target.nbytes]
            if entry.slot < 1 or source.nbytes != target.nbytes:
                raise TransferError(f"{kind} slot {entry.slot} is outside the mapped memory, or the carrier is closed")
            _copy_bytes(source, target)

    def close(self) -> None:
        """See `Carrier.close`. Later copies fail."""
        # The mapping ends when the last copy in progress has ended.
        self._view = memoryview(b"")


class NixlCarrier(Carrier):
    """Reads the peer's memory with NIXL. The agent keeps the peer, because copies may be in progress."""

    name = "nixl"

    def __init__(self, agent: NixlAgent, memory: HostMemory, remote: RemoteMemory):
        self._agent = agent
        self._memory = memory
        self._remote = remote
        self._peer = agent.add_peer(remote.nixl_metadata)

    def copy(self, copies: Sequence[PeerCopy]) -> None:
        """See `Carrier.copy`."""
        sources: list[tuple[int, int, int]] = []
        targets: list[tuple[int, int, int]] = []
        for entry, kind, target_slot, _ in copies:
            num_bytes = self._memory.layout.slot_bytes[kind]
            start = self._remote.offsets[kind] + (entry.slot - 1) * num_bytes
            if entry.slot < 1 or start + num_bytes > self._remote.num_bytes:
                raise TransferError("the peer named a slot that does not exist")
            sources.append((self._remote.address + start, num_bytes, 0))
            targets.append((self._memory.slot_address(kind, target_slot), num_bytes, 0))
        if not self._agent.read(self._peer, sources, targets):
            raise TransferError("NIXL could not read the peer's memory")


def make_carrier(
    setting: TransferCarrier, memory: HostMemory, remote: RemoteMemory, agent: NixlAgent | None
) -> Carrier | str:
    """The carrier that `setting` names; "auto": the first that works. Returns an error message if no carrier works."""
    reasons: list[str] = []
    if setting in ("auto", "shm"):
        try:
            return SharedMemoryCarrier(memory, remote)
        except OSError as error:
            reasons.append(f"shm: {error}")
    if setting in ("auto", "nixl"):
        if agent is not None and remote.nixl_metadata:
            try:
                return NixlCarrier(agent, memory, remote)
            except Exception as error:  # noqa: BLE001 (NIXL has exceptions of its own)
                reasons.append(f"nixl: {error}")
        else:
            reasons.append("nixl: both engines need nixl-cu12 or nixl-cu13")
    if setting in ("auto", "tcp"):
        if (entry_bytes := max(memory.layout.slot_bytes)) <= MAX_MESSAGE_BYTES:
            if reasons:
                _log.info("the connection carries KV blocks, because no other carrier works: %s", "; ".join(reasons))
            return TcpCarrier(memory)
        reasons.append(f"tcp: a KV block or state has {entry_bytes} bytes, but a message at most {MAX_MESSAGE_BYTES}")
    return "; ".join(reasons)


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    # Assigning a memoryview would stop all other threads, among them the engine's, until the copy has ended.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
