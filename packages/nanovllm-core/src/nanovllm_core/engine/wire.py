"""Messages between an engine process and its clients, sent as MessagePack over ZeroMQ."""

import msgspec
import numpy as np

from nanovllm_core.engine.status import EngineInfo, EngineStats
from nanovllm_core.errors import GrammarErrorCode
from nanovllm_core.grammar_types import GrammarSpec, ParameterTypes
from nanovllm_core.outputs import StepOutputs
from nanovllm_core.request import Request
from nanovllm_core.sampling_params import SamplingParams

# Number of request keys per client: `key // KEYS_PER_CLIENT` is the client number.
KEYS_PER_CLIENT = 1 << 32


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a client, which then waits for Ready or StartFailed."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Submits a request. The fields are those of `Request`. prompt_ids, prediction_ids: int32 arrays as bytes."""

    key: int
    id: str
    prompt_ids: bytes
    sampling: SamplingParams
    cache_salt: str
    priority: int
    arrival_time: float
    prediction_ids: bytes
    prefix_peer: str

    @classmethod
    def from_request(cls, key: int, request: Request) -> "Submit":
        """The message for `request`."""
        return cls(
            key,
            request.id,
            request.prompt_ids.tobytes(),
            request.sampling,
            request.cache_salt,
            request.priority,
            request.arrival_time,
            request.prediction_ids.tobytes(),
            request.prefix_peer,
        )

    def to_request(self) -> Request:
        """The request that the client sent."""
        prompt_ids, prediction_ids = (np.frombuffer(ids, np.int32) for ids in (self.prompt_ids, self.prediction_ids))
        return Request(
            self.id,
            prompt_ids,
            self.sampling,
            self.cache_salt,
            self.priority,
            self.arrival_time,
            prediction_ids,
            self.prefix_peer,
        )


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Aborts a request or a call of Compile. The engine answers an aborted call, and the client ignores the answer."""

    key: int


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Compiles a grammar. key: a new key of the client; the answer `Compiled` has the same key."""

    key: int
    grammar: GrammarSpec


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Resets the prefix cache. key: a new key of the client; the answer `PrefixCacheReset` has the same key."""

    key: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Stops the engine. Only the client that owns the engine sends this message."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves from now on. first_request_key: key of the client's first request."""

    info: EngineInfo
    first_request_key: int


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start. is_config_error: whether clients raise ConfigError instead of EngineDeadError."""

    message: str
    is_config_error: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step for one client, perhaps empty. stats: sent about ten times a second, else None."""

    outputs: StepOutputs
    stats: EngineStats | None


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The answer to Compile.

    error: arguments of the GrammarError; None if the grammar was compiled.
    parameter_types: see `Engine.compile_grammar`.
    """

    key: int
    error: tuple[str, str | None, GrammarErrorCode] | None = None
    parameter_types: ParameterTypes = {}


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    """The answer to ResetPrefixCache."""

    key: int


class EngineDied(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that failed."""

    reason: str


ToEngine = Hello | Submit | Abort | Compile | ResetPrefixCache | Stop
ToClient = Ready | StartFailed | Step | Compiled | PrefixCacheReset | EngineDied

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
