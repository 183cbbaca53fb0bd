"""The nanovllm engine: token ids in, token ids out.

Bring a model that answers to `nanovllm_core.model.CausalLM`, describe it with a `ModelSpec`, start an `AsyncEngine`,
and iterate over `generate`. Knows no text, no HTTP and no file formats.
"""

from nanovllm_core.config import ConfigError, EngineConfig
from nanovllm_core.engine import AsyncEngine, Engine, EngineClient, EngineDeadError, EngineInfo, EngineStats
from nanovllm_core.model import BuildContext, CausalLM, ForwardContext, ModelSpec, PagedSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.request import Request, RequestError, RequestOutput, SamplingParams, TokenLogprobs

__all__ = [
    "AsyncEngine",
    "BuildContext",
    "CausalLM",
    "ConfigError",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EngineDeadError",
    "EngineInfo",
    "EngineStats",
    "ForwardContext",
    "ModelSpec",
    "PagedSpec",
    "ParallelContext",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
]
