"""Answers to fetched prompts equal the answers to computed prompts, for every family, carrier and several settings.

The program `support/transfer_matrix.py` runs every carrier and setting with every model.
"""

import pytest
from rank_matrix import write_tiny_checkpoint
from tiny_models import TINY_MODELS
from transfer_matrix import CARRIERS, TRANSFER_SETTINGS, can_run, compare

# The first model of each family.
MODELS = list({tiny.family: name for name, tiny in reversed(TINY_MODELS.items())}.values())
# Each family has each carrier, and each setting has some family. Settings with two ranks start two more processes.
SETTINGS = list(TRANSFER_SETTINGS)
RUNS = [
    (name, setting, CARRIERS[index % len(CARRIERS)])
    for position, name in enumerate(MODELS)
    for index in range(len(CARRIERS))
    if can_run(name, setting := SETTINGS[(len(CARRIERS) * position + index) % len(SETTINGS)])
]
RUNS += [(name, "heads", "shm") for name in MODELS if TINY_MODELS[name].has_mtp]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting", "carrier"), sorted(set(RUNS)))
async def test_fetched_prompts_have_the_answers_of_computed_prompts(name, setting, carrier, tmp_path, device):
    write_tiny_checkpoint(name, tmp_path)
    await compare(tmp_path, device, setting, carrier)
