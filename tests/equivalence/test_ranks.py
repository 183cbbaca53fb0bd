"""Engines of two ranks give the greedy tokens of one rank.

The program `support/rank_matrix.py` runs every setting with every model.
"""

import pytest
import torch
from rank_matrix import RANK_SETTINGS, TINY_MODELS, compare, write_tiny_checkpoint

# The first model of each family.
MODELS = list({tiny.family: name for name, tiny in reversed(TINY_MODELS.items())}.values())
ATTENTION_MODELS = [name for name in MODELS if TINY_MODELS[name].family in ("Llama", "Qwen3Next", "DeepseekV3")]
SETTINGS_WITH_OWN_REQUESTS = [
    name for name, (_, rank_settings) in RANK_SETTINGS.items() if rank_settings.get("dp_attention")
]
OTHER_SETTINGS = [name for name in RANK_SETTINGS if name not in SETTINGS_WITH_OWN_REQUESTS]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, OTHER_SETTINGS) for name in MODELS),
        *((name, SETTINGS_WITH_OWN_REQUESTS) for name in ATTENTION_MODELS),
    ],
    ids=[*MODELS, *(f"{name}, own requests" for name in ATTENTION_MODELS)],
)
async def test_two_ranks_give_the_tokens_of_one_rank(name, settings, tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    write_tiny_checkpoint(name, tmp_path)
    await compare(tmp_path, device, settings[MODELS.index(name) % len(settings)])
