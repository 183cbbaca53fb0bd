"""Engines of two ranks give the greedy tokens of one rank, which test_families.py compares to transformers.

The first model of each family has one setting here. The program `support/rank_matrix.py` runs every setting with every
model.
"""

import pytest
import torch
from rank_matrix import RANK_SETTINGS, TINY_MODELS, compare, write_tiny_checkpoint

SETTINGS = list(RANK_SETTINGS)
# The first model of each family.
MODELS = list({tiny.family: name for name, tiny in reversed(TINY_MODELS.items())}.values())


@pytest.mark.parametrize("name", MODELS)
async def test_two_ranks_give_the_tokens_of_one_rank(name, tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    index = MODELS.index(name)
    write_tiny_checkpoint(name, tmp_path)
    await compare(tmp_path, device, SETTINGS[index % len(SETTINGS)])
