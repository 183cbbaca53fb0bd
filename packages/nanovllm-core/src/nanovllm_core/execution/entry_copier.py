"""Executes batches of copies between a rank's caches and the host memory."""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.anonymous_memory import AnonymousMemory
from nanovllm_core.cache.host_memory import (
    STAGING_BYTES,
    CopyBatch,
    Direction,
    EntryCopies,
    EntryKind,
    HostLayout,
    HostMemory,
)
from nanovllm_core.cache.memory import CacheLayout, CacheMemory
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.execution.plan_messages import PlanPublisher
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.block_copy import BlockParts, gather_blocks, scatter_blocks

_MAY_PIN_INTERVAL_S = 0.02  # between checks of `HostMemory.may_pin`
_log = logging.getLogger(__name__)


class EntryCopier:
    """Executes the batches of each direction in order.

    On a CPU, `launch` executes the batch. On a GPU, each direction has a thread and a stream.

    An entry is a block of keys and values, or a checkpoint of recurrent states. All calls come from the thread that
    launches steps.

    cache: must have its final size.
    publisher: sends the batches of rank 0 to the other ranks. None on the other ranks, and if there is only one rank.
    """

    def __init__(
        self,
        cache: CacheMemory,
        memory: HostMemory,
        parallel: ParallelContext,
        device: torch.device,
        publisher: PlanPublisher | None,
    ):
        self.memory = memory
        self._publisher = publisher
        self._device = device
        self._rank = parallel.rank
        self._request_group_index = parallel.rank if parallel.splits_requests else 0
        self._block_parts = [BlockParts(caches) for caches in cache.caches_by_kind]
        host_part = 0 if parallel.splits_requests else parallel.rank
        self._slots = [memory.part(EntryKind(kind), host_part) for kind in range(len(self._block_parts))]
        # Each layer's cache has a part of every entry. These buffers have whole entries, so that each entry is one copy
        # between the device and the host.
        staging_bytes = _count_staging_bytes(cache.layout)
        self._staging = [torch.empty(staging_bytes, dtype=torch.uint8, device=device) for _ in Direction]
        self._queues: list[SimpleQueue[tuple[CopyBatch, torch.cuda.Event] | None]] = [SimpleQueue() for _ in Direction]
        self._threads: list[threading.Thread] = []
        self._pinned_pieces: list[Tensor] = []
        self._is_closing = False
        if device.type == "cpu":
            memory.set_ready(self._rank)
            return
        self._compile_kernels()
        for direction in Direction:
            self._start_thread(f"nanovllm-{direction.name.lower()}s", self._execute_queue, direction)
        # Pinning hundreds of GiB takes minutes, so a thread does it.
        self._start_thread("nanovllm-pinning", self._pin)

    def launch(self, batch: CopyBatch) -> None:
        """Execute a batch on all ranks, after the steps launched so far. `HostMemory` counts the executed batches."""
        if self._publisher is not None:
            self._publisher.publish_copies(batch)
        if self._device.type == "cpu":
            self._execute(batch)
        else:
            event = torch.cuda.Event()
            event.record()
            self._queues[batch.direction].put((batch, event))

    def close(self) -> None:
        """Wait for the batches in flight, and unpin the host memory."""
        self._is_closing = True
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()
        for piece in self._pinned_pieces:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(piece.data_ptr())

    def _start_thread(self, name: str, target: Callable[..., None], *args: Direction) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _compile_kernels(self) -> None:
        null_entry = torch.zeros(1, dtype=torch.int64, device=self._device)
        for parts in self._block_parts:
            rows = self._staging[0][: parts.row_bytes].view(1, -1)
            gather_blocks(parts, null_entry, rows)
            scatter_blocks(parts, null_entry, rows)

    def _pin(self) -> None:
        """Pin the host memory, so that the device copies it without the CPU. If this fails, no entry is ever copied."""
        torch.cuda.set_device(self._device)
        cudart: Any = torch.cuda.cudart()
        while not self.memory.may_pin and not self._is_closing:
            time.sleep(_MAY_PIN_INTERVAL_S)
        for piece in self.memory.pieces():
            if self._is_closing:
                return
            # Allocate the pages here, and not in cudaHostRegister, which blocks other CUDA calls.
            piece.zero_()
            if (error := int(cudart.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))) != 0:
                _log.error("host memory can't be pinned: CUDA error %d; the cache has no tier in host memory", error)
                return
            self._pinned_pieces.append(piece)
        self.memory.set_ready(self._rank)

    def _execute_queue(self, direction: Direction) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            while (item := self._queues[direction].get()) is not None:
                batch, event = item
                stream.wait_event(event)
                self._execute(batch, stream)

    @torch.inference_mode()
    def _execute(self, batch: CopyBatch, stream: torch.cuda.Stream | None = None) -> None:
        """Execute and count a batch. stream: the current stream on a GPU; None on a CPU."""
        try:
            try:
                for copies in batch.copies:
                    if copies.group == self._request_group_index:
                        self._copy(batch.direction, copies)
            finally:
                # Wait even after an error, because copies that were launched before the error may be in progress.
                if stream is not None:
                    # The thread sleeps until the event, because spinning would take a core.
                    end = torch.cuda.Event(blocking=True)
                    end.record(stream)
                    end.synchronize()
        except Exception:  # noqa: BLE001 (the failure is counted, and rank 0 then uses none of these copies)
            # Do not raise: if the device has failed, the next step reports the failure.
            _log.exception("a copy between the cache and host memory failed")
            self.memory.count_failure(self._rank)
        self.memory.count_done(self._rank, batch.direction)

    def _copy(self, direction: Direction, copies: EntryCopies) -> None:
        parts, slots, staging = self._block_parts[copies.kind], self._slots[copies.kind], self._staging[direction]
        max_rows = len(staging) // parts.row_bytes
        for start in range(0, len(copies.entries), max_rows):
            entries = self._upload(copies.entries[start : start + max_rows])
            rows = staging[: len(entries) * parts.row_bytes].view(len(entries), -1)
            host_rows = [slots[slot - 1] for slot in copies.slots[start : start + max_rows]]  # slots count from 1
            if direction is Direction.STORE:
                gather_blocks(parts, entries, rows)
                for row, host_row in zip(rows, host_rows, strict=True):
                    host_row.copy_(row, non_blocking=True)
            else:
                for row, host_row in zip(rows, host_rows, strict=True):
                    row.copy_(host_row, non_blocking=True)
                scatter_blocks(parts, entries, rows)

    def _upload(self, entries: list[int]) -> Tensor:
        tensor = torch.tensor(entries, dtype=torch.int64)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


def make_copier(
    cache: CacheMemory,
    config: ResolvedConfig,
    memory: AnonymousMemory | None,
    parallel: ParallelContext,
    publisher: PlanPublisher | None = None,
) -> EntryCopier | None:
    """A rank's copier; None if there is no host memory. Raises ConfigError if the host memory is too small.

    memory: result of `allocate_host_memory`, shared by all ranks.
    """
    if memory is None:
        return None
    host_memory = HostMemory(memory, HostLayout.plan(config, cache.layout))
    # Threads need the index of the device, because they do not inherit the current device.
    device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return EntryCopier(cache, host_memory, parallel, device, publisher)


def count_staging_bytes(config: ResolvedConfig, layout: CacheLayout) -> int:
    """Bytes of GPU memory that the copier of `config` takes."""
    if not config.kv_offload_gib or config.device == "cpu":
        return 0
    return len(Direction) * _count_staging_bytes(layout)


def _count_staging_bytes(layout: CacheLayout) -> int:
    return max(STAGING_BYTES, layout.block_bytes, layout.slot_bytes)
