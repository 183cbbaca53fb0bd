"""Describes how the engine's process loads the model."""

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_core import EngineConfig
from nanovllm_core.engine.parent_watch import exit_with_parent
from nanovllm_models import ModelDirectory
from nanovllm_server.observability.logs import LogFormat, configure_logs

if TYPE_CHECKING:
    from nanovllm_core import ModelSpec
    from nanovllm_server.settings import LoadFormat


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """A callable that imports torch and loads the model. `EngineProcess` calls it in the engine's process.

    visible_gpus: value of CUDA_VISIBLE_DEVICES; None: unchanged.
    private_directory: directory that the engine removes if the parent is killed.
    """

    model: ModelDirectory
    draft_model: ModelDirectory | None
    load_format: "LoadFormat"
    log_format: LogFormat
    log_level: str
    engine_config: EngineConfig
    visible_gpus: str | None = None
    private_directory: Path | None = None

    def __call__(self) -> "tuple[ModelSpec, EngineConfig]":
        """Returns (model, configuration). Raises ModelError."""
        configure_logs(self.log_format, self.log_level)
        if self.visible_gpus is not None:
            # CUDA reads this variable when it initialises, which happens only after this call.
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_gpus
        if self.private_directory is not None:
            # With the event set, the engine has some seconds to exit by itself after the parent has ended.
            exit_with_parent(partial(shutil.rmtree, self.private_directory, ignore_errors=True)).set()
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
