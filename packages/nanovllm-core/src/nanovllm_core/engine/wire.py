"""What engine and client say to each other: msgspec structs as MessagePack over ZeroMQ.

Client to engine: Hello once, then Submit, Abort and Compile; Stop from the one that owns the engine. Engine to client:
Ready or Failed once, then one Step for every step that has something for that client (and now and then an empty one), a
Compiled for every Compile, and Dead when the loop fails. This room must not know who listens.
"""

import msgspec
import numpy as np

from nanovllm_core.engine.status import EngineInfo, EngineStats
from nanovllm_core.request import GrammarSpec, Request, SamplingParams, StepOutputs

# Each client's requests have keys of its own, this many: key // KEYS_PER_CLIENT tells the client.
KEYS_PER_CLIENT = 1 << 32


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A client is there and waits for Ready or Failed."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request: its sender's part of `Request`. prompt_ids: int32 [num_prompt_tokens], as bytes."""

    key: int
    id: str
    prompt_ids: bytes
    sampling: SamplingParams
    cache_salt: str
    priority: int
    arrival_time: float

    @classmethod
    def of(cls, request: Request) -> "Submit":
        """The message that stands for `request`."""
        return cls(
            request.key,
            request.id,
            request.prompt_ids.tobytes(),
            request.sampling,
            request.cache_salt,
            request.priority,
            request.arrival_time,
        )

    def request(self) -> Request:
        """The request that this message stands for."""
        prompt_ids = np.frombuffer(self.prompt_ids, np.int32)
        request = Request(self.id, prompt_ids, self.sampling, self.cache_salt, self.priority, self.arrival_time)
        request.key = self.key
        return request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this request any more."""

    key: int


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Have a grammar compiled. key: like a request's, for the answer."""

    key: int
    grammar: GrammarSpec


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Let the engine end."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves from now on. first_key: where the keys begin that are this client's."""

    info: EngineInfo
    first_key: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start. expected: the message alone tells the user what to do, no traceback needed."""

    message: str
    expected: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    """All that one step made for one client, and now and then the engine's state."""

    outputs: StepOutputs
    stats: EngineStats | None


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Compile. error: why it can't be done, None when it is."""

    key: int
    error: str | None


class Dead(msgspec.Struct, frozen=True, tag=True):
    """The engine failed; no more will come."""

    reason: str


ToEngine = Hello | Submit | Abort | Compile | Stop
ToClient = Ready | Failed | Step | Compiled | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
