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

# open: serve. drain: refuse new requests, and report the end of the last running request. close: exit.
# report_alive: report "alive" from the event loop.
WorkerOrder = Literal["open", "drain", "close", "report_alive"]
# ready: the worker can serve. drained: after the order "drain", the last request has ended. alive: see "report_alive".
WorkerReport = Literal["ready", "drained", "alive"]


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Reports that the worker can't start. is_user_error: the cause is a setting or the model."""

    message: str
    is_user_error: bool


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """The arguments of a worker's process.

    index: selects the worker's row in `counters` and the worker's ring in `rings`.
    model: directory of the tokenizer.
    template: chat template; None for the model's template.
    defaults: values of sampling parameters that a request does not set.
    rings: None for a single worker.
    """

    index: int
    settings: Settings
    model: Path
    template: str | None
    defaults: SamplingDefaults
    engine: EngineAddress
    engine_pid: int | None
    listener: socket.socket
    counters: "Array[c_double]"
    rings: RingMemory | None
