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

# open: start to serve. drain: refuse new requests, report when the running requests have ended, and continue until
# "close". close: end.
WorkerOrder = Literal["open", "drain", "close"]
WorkerReport = Literal["ready", "drained"]


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A worker's report that it can't start.

    is_user_error: the cause is a setting or the model, and the message alone says what to do.
    """

    message: str
    is_user_error: bool


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """The arguments of a worker's process. The process inherits the socket and the shared memory.

    index: index of the worker, of its row in `counters` and of its ring in `rings`.
    model: directory of the tokenizer.
    template: chat template to use instead of the model's template; None for the model's template.
    defaults: sampling parameters that the model recommends.
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
