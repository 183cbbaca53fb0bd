"""The nanovllm engine: token ids in, token ids out.

Implement `nanovllm_core.model.CausalLM`, describe the model with a `ModelSpec`, start an `AsyncEngine`, and call
`generate`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm_core.config import EngineConfig
    from nanovllm_core.engine.async_engine import AsyncEngine
    from nanovllm_core.engine.client import EngineClient
    from nanovllm_core.engine.interface import Engine, OpenRequest
    from nanovllm_core.engine.process import EngineAddress, EngineProcess
    from nanovllm_core.engine.status import EngineInfo, EngineStats
    from nanovllm_core.errors import ConfigError, EngineDeadError, GrammarError, RequestError
    from nanovllm_core.grammar_types import GrammarSpec
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
    from nanovllm_core.outputs import PromptLogprobs, PromptTokenLogprobs, RequestOutput, TokenLogprobs
    from nanovllm_core.parallel import ParallelContext
    from nanovllm_core.request import Request
    from nanovllm_core.sampling_params import ReasoningBudget, SamplingParams

__all__ = [
    "AsyncEngine",
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
    "ReasoningBudget",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StateCache",
    "StateSpec",
    "TokenLogprobs",
    "Vocabulary",
]

# Modules are imported on first use of a name: a command line needs no numpy, and a process that only talks to an engine
# no torch, which takes seconds and half a gigabyte.
_NAMES_BY_MODULE = {
    "config": "EngineConfig",
    "engine.async_engine": "AsyncEngine",
    "engine.client": "EngineClient",
    "engine.interface": "Engine OpenRequest",
    "engine.process": "EngineAddress EngineProcess",
    "engine.status": "EngineInfo EngineStats",
    "errors": "ConfigError EngineDeadError GrammarError RequestError",
    "grammar_types": "GrammarSpec",
    "model": (
        "BuildContext CacheSpec CausalLM ForwardContext MLASpec ModelSpec PagedSpec StateCache StateSpec Vocabulary"
    ),
    "outputs": "PromptLogprobs PromptTokenLogprobs RequestOutput TokenLogprobs",
    "parallel": "ParallelContext",
    "request": "Request",
    "sampling_params": "ReasoningBudget SamplingParams",
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
