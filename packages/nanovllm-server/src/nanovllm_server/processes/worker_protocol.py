"""The arguments of a worker's process, and the messages between the worker and its parent."""

import socket
from ctypes import Array, c_double
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanovllm_core import EngineAddress
from nanovllm_server.processes.rings import RingMemory
from nanovllm_server.protocol.request import SamplingDefaults
from nanovllm_server.settings import Settings

# open: start to serve. drain: refuse new requests, report when the running ones have ended, go on until "close".
# close: end.
Order = Literal["open", "drain", "close"]
Report = Literal["ready", "drained"]


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A worker's report that it can't start. expected: the message alone tells the user what to do."""

    message: str
    expected: bool


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """The arguments of a worker's process, which inherits the sockets and pipes among them.

    index: number of the worker: its row in `counters` and its ring in `rings`.
    model: directory of the tokenizer.
    template: chat template to use instead of the model's own; None for the model's own.
    defaults: sampling parameters that the model advises.
    engine: address of the engine's process.
    listener: bound socket on which the worker serves.
    counters: memory of `SharedCounters`.
    rings: memory in which workers share encodings; None if there is one worker.
    """

    index: int
    settings: Settings
    model: Path
    template: str | None
    defaults: SamplingDefaults
    engine: EngineAddress
    listener: socket.socket
    counters: "Array[c_double]"
    rings: RingMemory | None
