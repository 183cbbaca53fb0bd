"""Runs `nanovllm-server`. Steps propose as many drafts as they may, because all measured times are 0."""

import sys

from nanovllm_core import EngineConfig, ModelSpec
from nanovllm_server.cli import main
from nanovllm_server.processes.engine_recipe import EngineRecipe

load_model = EngineRecipe.__call__


def load_model_and_replace_times(recipe: EngineRecipe) -> tuple[ModelSpec, EngineConfig]:
    # Only the engine's process may import these modules, because they import torch.
    from nanovllm_core.engine import build
    from nanovllm_core.scheduling.draft_times import DraftTimes

    build.measure_draft_times = lambda *_: DraftTimes()
    return load_model(recipe)


# The engine's process imports this module too, before it calls the recipe.
EngineRecipe.__call__ = load_model_and_replace_times

if __name__ == "__main__":
    sys.exit(main())
