"""A callable that makes the model's spec and configuration in the engine's process. Only the call imports torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_core import EngineConfig

if TYPE_CHECKING:
    from nanovllm_core import ModelSpec
    from nanovllm_server.settings import DType, LoadFormat


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """The argument of `EngineProcess`. dtype: replaces `engine.dtype`; None for the checkpoint's dtype."""

    model: Path
    load_format: "LoadFormat"
    dtype: "DType | None"
    engine: EngineConfig

    def __call__(self) -> "tuple[ModelSpec, EngineConfig]":
        """Returns the model's spec and the engine's configuration. Raises ModelError."""
        import torch

        import nanovllm_models

        spec = nanovllm_models.load(self.model, load_format=self.load_format, seed=self.engine.seed)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return spec, replace(self.engine, dtype=None if self.dtype is None else dtypes[self.dtype])
