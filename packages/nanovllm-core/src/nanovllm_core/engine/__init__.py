"""The engine's outside: requests in, outputs out, in this process or from another."""

from nanovllm_core.engine.async_engine import AsyncEngine
from nanovllm_core.engine.client import EngineClient
from nanovllm_core.engine.engine import Engine
from nanovllm_core.engine.status import EngineDeadError, EngineInfo, EngineStats

__all__ = ["AsyncEngine", "Engine", "EngineClient", "EngineDeadError", "EngineInfo", "EngineStats"]
