"""A callable that makes the model's spec and configuration in the engine's process. Only the call imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_core import EngineConfig

if TYPE_CHECKING:
    from nanovllm_core import ModelSpec
    from nanovllm_server.settings import LoadFormat


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """The argument of `EngineProcess`."""

    model: Path
    load_format: "LoadFormat"
    engine: EngineConfig

    def __call__(self) -> "tuple[ModelSpec, EngineConfig]":
        """Returns the model's spec and the engine's configuration. Raises ModelError."""
        import nanovllm_models

        return nanovllm_models.load(self.model, load_format=self.load_format, seed=self.engine.seed), self.engine
