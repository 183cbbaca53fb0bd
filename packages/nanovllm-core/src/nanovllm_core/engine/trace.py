"""Writes traces of steps as a file that Perfetto and chrome://tracing open.

The format is Chrome's JSON array with one object per line. It needs no closing bracket, so a killed process leaves a
readable trace.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch

from nanovllm_core.errors import ConfigError
from nanovllm_core.execution.step_handle import StepHandle

_encode = msgspec.json.Encoder().encode


Track = Literal["plan", "launch", "device", "output"]
# Tracks in the order in which viewers show them.
TRACKS: dict[Track, int] = {"plan": 0, "launch": 1, "device": 2, "output": 3}


class Trace:
    """A trace file. Viewers show tracks as threads. Raises ConfigError if the file can't be written."""

    def __init__(self, path: Path):
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"trace is {str(path)!r}, which can't be written ({error.strerror}): choose another file"
            ) from error
        self._file.write(b"[\n")
        for track, number in TRACKS.items():
            self._write({"ph": "M", "name": "thread_name", "tid": number, "args": {"name": track}})

    @contextmanager
    def span(self, track: Track, name: str, **args: float) -> Generator[None]:
        """Record the time spent in this context. args: numbers that describe it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(track, name, begin, time.perf_counter(), **args)

    def add(self, track: Track, name: str, begin: float, end: float, **args: float) -> None:
        """Record a span from `begin` to `end`, in seconds of `time.perf_counter`. args: numbers that describe it."""
        duration = round((end - begin) * 1e6, 1)
        event: dict[str, object] = {"name": name, "tid": TRACKS[track], "ts": round(begin * 1e6, 1), "dur": duration}
        self._write({"ph": "X", **event, "args": args})

    def close(self) -> None:
        """Write buffered spans and close the file."""
        self._file.close()

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(_encode({"pid": os.getpid(), **event}) + b",\n")


class Tracer:
    """The trace of an engine's steps: spans of the host, and on a GPU of the device."""

    def __init__(self, trace: Trace, device: torch.device):
        self.trace = trace
        self._origin: torch.cuda.Event | None = None
        # Time of `_origin` by `time.perf_counter`.
        self._origin_s = 0.0
        if device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
            self._origin_s = time.perf_counter()

    def device(self, step: int, handle: StepHandle) -> None:
        """Record when a GPU ran a finished step. Nothing is recorded on a CPU: launching includes computing there."""
        if self._origin is not None and handle.events is not None:
            begin, end = (self._origin_s + self._origin.elapsed_time(each) / 1e3 for each in handle.events)
            self.trace.add("device", f"step {step}", begin, end)
