"""Samples of the pairs of tiny models and settings. If NANOVLLM_ALL_PAIRS is 1, tests run all pairs."""

import os
from collections.abc import Iterable

ALL_PAIRS = os.environ.get("NANOVLLM_ALL_PAIRS") == "1"


def sample_pairs(models: Iterable[str], settings: Iterable[str], num_per_model: int, first: int = 0) -> list:
    """Returns `num_per_model` pairs (model, setting) per model.

    Each model gets the settings after those of the previous model. The first setting comes after the last.
    first: index of the first model's first setting.
    """
    settings = list(settings)
    count = len(settings) if ALL_PAIRS else min(num_per_model, len(settings))
    return [
        (model, settings[(first + index * count + offset) % len(settings)])
        for index, model in enumerate(models)
        for offset in range(count)
    ]
