"""Describes how the engine's process loads the model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm_core import EngineConfig
from nanovllm_models import ModelDirectory
from nanovllm_server.observability.logs import LogFormat, configure_logs

if TYPE_CHECKING:
    from nanovllm_core import ModelSpec
    from nanovllm_server.settings import LoadFormat


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """A callable that imports torch and loads the model. `EngineProcess` calls it in the engine's process.

    draft_model: None if there is no draft model.
    """

    model: ModelDirectory
    draft_model: ModelDirectory | None
    load_format: "LoadFormat"
    log_format: LogFormat
    log_level: str
    engine_config: EngineConfig

    def __call__(self) -> "tuple[ModelSpec, EngineConfig]":
        """Returns (model, configuration). Raises ModelError."""
        configure_logs(self.log_format, self.log_level)
        import nanovllm_models

        config, model = self.engine_config, self.model
        spec = nanovllm_models.load(
            model.path,
            load_format=self.load_format,
            seed=config.seed,
            served_name=model.name,
            draft=self.draft_model,
        )
        return spec, config
