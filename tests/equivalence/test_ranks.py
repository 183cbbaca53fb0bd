"""Engines of two ranks give the greedy tokens of one rank, which test_families.py compares to transformers.

Each model has two settings here. `python tests/equivalence/support/rank_matrix.py` runs every setting with every model.
"""

import pytest
import torch
from rank_matrix import RANK_SETTINGS, TINY_MODELS, compare, write_tiny_checkpoint

SETTINGS_WITH_OWN_REQUESTS = [name for name, (_, ranks) in RANK_SETTINGS.items() if ranks.get("dp_attention")]
OTHER_SETTINGS = [name for name in RANK_SETTINGS if name not in SETTINGS_WITH_OWN_REQUESTS]


@pytest.mark.parametrize("settings", [OTHER_SETTINGS, SETTINGS_WITH_OWN_REQUESTS], ids=["shared", "own requests"])
@pytest.mark.parametrize("name", TINY_MODELS)
async def test_two_ranks_give_the_tokens_of_one_rank(name, settings, tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    index = list(TINY_MODELS).index(name)
    write_tiny_checkpoint(name, tmp_path)
    await compare(tmp_path, device, settings[index % len(settings)])
