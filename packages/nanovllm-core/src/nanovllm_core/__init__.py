"""The nanovllm engine: token ids in, token ids out.

Implement `nanovllm_core.model.CausalLM`, describe the model with a `ModelSpec`, start an `AsyncEngine`, and call
`generate`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nanovllm_core.config import ConfigError, EngineConfig
from nanovllm_core.engine.client import EngineAddress, EngineClient, EngineProcess
from nanovllm_core.engine.engine import Engine, OpenRequest
from nanovllm_core.engine.status import EngineDeadError, EngineInfo, EngineStats
from nanovllm_core.request import (
    Budget,
    GrammarError,
    GrammarSpec,
    PromptLogprobs,
    PromptTokenLogprobs,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from nanovllm_core.engine.async_engine import AsyncEngine
    from nanovllm_core.model import (
        BuildContext,
        CacheSpec,
        CausalLM,
        ForwardContext,
        MLASpec,
        ModelSpec,
        PagedSpec,
        StateCache,
        StateSpec,
        Vocabulary,
    )
    from nanovllm_core.parallel import ParallelContext

__all__ = [
    "AsyncEngine",
    "Budget",
    "BuildContext",
    "CacheSpec",
    "CausalLM",
    "ConfigError",
    "Engine",
    "EngineAddress",
    "EngineClient",
    "EngineConfig",
    "EngineDeadError",
    "EngineInfo",
    "EngineProcess",
    "EngineStats",
    "ForwardContext",
    "GrammarError",
    "GrammarSpec",
    "MLASpec",
    "ModelSpec",
    "OpenRequest",
    "PagedSpec",
    "ParallelContext",
    "PromptLogprobs",
    "PromptTokenLogprobs",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StateCache",
    "StateSpec",
    "TokenLogprobs",
    "Vocabulary",
]

# What imports torch, which takes seconds and half a gigabyte: a process that only talks to an engine needs neither.
_ON_FIRST_USE = {
    "AsyncEngine": "nanovllm_core.engine.async_engine",
    "BuildContext": "nanovllm_core.model",
    "CacheSpec": "nanovllm_core.model",
    "CausalLM": "nanovllm_core.model",
    "ForwardContext": "nanovllm_core.model",
    "MLASpec": "nanovllm_core.model",
    "ModelSpec": "nanovllm_core.model",
    "PagedSpec": "nanovllm_core.model",
    "ParallelContext": "nanovllm_core.parallel",
    "StateCache": "nanovllm_core.model",
    "StateSpec": "nanovllm_core.model",
    "Vocabulary": "nanovllm_core.model",
}


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_FIRST_USE[name]), name)
