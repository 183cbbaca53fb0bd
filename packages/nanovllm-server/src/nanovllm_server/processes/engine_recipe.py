"""The recipe with which the engine's process makes its model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_core import EngineConfig

if TYPE_CHECKING:
    from nanovllm_core import ModelSpec
    from nanovllm_server.settings import LoadFormat


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """The argument of `EngineProcess`. Calling the recipe imports torch; making the recipe does not."""

    model: Path
    load_format: "LoadFormat"
    engine_config: EngineConfig

    def __call__(self) -> "tuple[ModelSpec, EngineConfig]":
        """Loads the model. Raises ModelError."""
        import nanovllm_models

        config = self.engine_config
        return nanovllm_models.load(self.model, load_format=self.load_format, seed=config.seed), config
