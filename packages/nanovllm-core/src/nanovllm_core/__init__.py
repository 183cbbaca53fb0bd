"""The nanovllm engine, which continues sequences of token ids.

To serve a model, implement `CausalLM`, describe the model with a `ModelSpec`, and start an `AsyncEngine`.
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

__all__ = ["AsyncEngine", "Engine", "EngineAddress", "EngineClient", "EngineConfig", "EngineInfo", "EngineProcess"]
__all__ += ["ConfigError", "EngineDeadError", "EngineStats", "GrammarError", "RequestError"]
__all__ += ["GrammarSpec", "OpenRequest", "ReasoningBudget", "Request", "SamplingParams"]
__all__ += ["PromptLogprobs", "PromptTokenLogprobs", "RequestOutput", "TokenLogprobs"]
__all__ += ["BuildContext", "CausalLM", "ForwardContext", "ModelSpec", "ParallelContext", "Vocabulary"]
__all__ += ["CacheSpec", "MLASpec", "PagedSpec", "StateCache", "StateSpec"]

# `__getattr__` imports a module when one of its names is first used, because importing torch takes seconds and 0.5 GB.
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
