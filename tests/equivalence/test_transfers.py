"""Answers to fetched prompts equal answers to computed prompts.

The program `support/transfer_matrix.py` runs every carrier and setting with every model.
"""

from itertools import cycle

import pytest
from rank_matrix import write_tiny_checkpoint
from tiny_models import TINY_MODELS
from transfer_matrix import TRANSFER_SETTINGS, compare
from transfer_pairs import CARRIERS

# The first model of each family.
MODELS = list({tiny.family: name for name, tiny in reversed(TINY_MODELS.items())}.values())
HEAD_MODELS = [name for name in MODELS if TINY_MODELS[name].has_mtp]
SETTINGS = [setting for setting in TRANSFER_SETTINGS if setting not in ("MTP heads", "own requests")]
PAIRS = [*((name, "MTP heads") for name in HEAD_MODELS), *zip(cycle(MODELS), SETTINGS, strict=False)]
RUNS = [(*pair, carrier) for pair, carrier in zip(PAIRS, cycle(CARRIERS), strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting", "carrier"), RUNS)
async def test_fetched_prompts_have_the_answers_of_computed_prompts(name, setting, carrier, tmp_path, device):
    write_tiny_checkpoint(name, tmp_path)
    stats = await compare(tmp_path, device, setting, carrier)
    assert all(num_tokens > 0 for _, num_tokens in stats.loaded_tokens), stats.loaded_tokens
