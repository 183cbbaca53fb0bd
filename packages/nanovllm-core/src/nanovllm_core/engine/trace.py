"""Writes a trace file of steps for Perfetto and chrome://tracing.

The format is Chrome's JSON array. The closing bracket is optional, so the trace of a killed process is readable.
"""

import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import msgspec
import torch

from nanovllm_core.cache.prefix_load import PrefixLoad
from nanovllm_core.errors import ConfigError
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.scheduling.plan import ScheduledStep
from nanovllm_core.transfer.fetches import PrefixFetch

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

Track = Literal["plan", "launch", "device", "output", "load", "fetch"]
TRACK_IDS: dict[Track, int] = {"plan": 0, "launch": 1, "device": 2, "output": 3, "load": 4, "fetch": 5}


class TraceFile:
    """A trace file. Viewers show each track as a thread. Raises ConfigError if the file can't be opened.

    If a later write fails, because a disk is full for example, the file gets no more spans.
    """

    def __init__(self, path: Path):
        self._path = path
        self._has_failed = False
        try:
            self._stream = path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"trace is {str(path)!r}, which can't be written ({error.strerror}): choose another file"
            ) from error
        self._write_bytes(b"[\n")
        for track, track_id in TRACK_IDS.items():
            self._write({"ph": "M", "name": "thread_name", "tid": track_id, "args": {"name": track}})

    @contextmanager
    def span(self, track: Track, name: str, **args: float) -> Generator[None]:
        """Record the duration of this context. args: numbers that viewers show with the span."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self.add_span(track, name, begin_s, time.perf_counter(), **args)

    def add_span(self, track: Track, name: str, begin_s: float, end_s: float, **args: float) -> None:
        """Record a span between two times of `time.perf_counter`. args: see `span`."""
        begin_us, duration_us = round(begin_s * 1e6, 1), round((end_s - begin_s) * 1e6, 1)
        event: dict[str, object] = {"name": name, "tid": TRACK_IDS[track], "ts": begin_us, "dur": duration_us}
        self._write({"ph": "X", **event, "args": args})

    def close(self) -> None:
        """Write buffered spans and close the file."""
        with self._recorded_failures():
            self._stream.close()

    def _write(self, event: dict[str, object]) -> None:
        self._write_bytes(_encode({"pid": os.getpid(), **event}) + b",\n")

    def _write_bytes(self, data: bytes) -> None:
        if not self._has_failed:
            with self._recorded_failures():
                self._stream.write(data)

    @contextmanager
    def _recorded_failures(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                _log.error("the trace %s ends here, because it can't be written: %s", self._path, error.strerror)
            self._has_failed = True


class StepTracer:
    """Records the device's spans in `file`. Callers record the host's spans with `file.span`."""

    def __init__(self, file: TraceFile, device: torch.device):
        self.file = file
        self._origin_event: torch.cuda.Event | None = None
        # Device times are relative to `_origin_event`. `_origin_s` is the `time.perf_counter` time of this event.
        self._origin_s = 0.0
        if device.type == "cuda":
            self._origin_event = torch.cuda.Event(enable_timing=True)
            self._origin_event.record()
            self._origin_event.synchronize()
            self._origin_s = time.perf_counter()

    def record_device_span(self, step_number: int, handle: StepHandle) -> None:
        """Record when a GPU ran a finished step. Does nothing on a CPU, where the launch computes the step."""
        if self._origin_event is not None and handle.events is not None:
            begin_s, end_s = (self._origin_s + self._origin_event.elapsed_time(event) / 1e3 for event in handle.events)
            self.file.add_span("device", f"step {step_number}", begin_s, end_s)

    def record_loads(self, loads: Sequence[PrefixLoad]) -> None:
        """Record loads from the host memory that have ended now."""
        for load in loads:
            self.file.add_span(
                "load",
                f"request {load.request.client_request.id}",
                load.begin_s,
                time.perf_counter(),
                host_tokens=load.num_tokens - load.num_file_tokens,
                file_tokens=load.num_file_tokens,
            )

    def record_fetch(self, fetch: PrefixFetch) -> None:
        """Record an ended fetch. peer_us: microseconds that the other engine needed."""
        self.file.add_span(
            "fetch",
            f"request {fetch.request.client_request.id}: {fetch.outcome}",
            fetch.begin_s,
            fetch.end_s,
            tokens=fetch.num_tokens,
            entries=len(fetch.entries),
            arrived=len(fetch.arrived_positions),
            peer_us=round(fetch.peer_s * 1e6, 1),
        )


def trace_launch(tracer: StepTracer | None, step: ScheduledStep) -> AbstractContextManager[None]:
    """Record the launch of a step, which is the duration of this context."""
    if tracer is None:
        return nullcontext()
    predicted_us = round(step.predicted_s * 1e6, 1)
    name = f"step {step.plan.step_number}"
    return tracer.file.span("launch", name, **step.work._asdict(), predicted_us=predicted_us)


def trace_span(tracer: StepTracer | None, track: Track, step_number: int) -> AbstractContextManager[None]:
    """Record the duration of this context, which is a part of a step."""
    return nullcontext() if tracer is None else tracer.file.span(track, f"step {step_number}")
