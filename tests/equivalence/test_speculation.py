"""Answers with drafts equal the answers without them, for every family and several settings of the engine.

Each request predicts its answer, with a wrong token here and there. So steps accept and reject drafts everywhere.
"""

import pytest
from rank_matrix import write_tiny_checkpoint
from tiny_models import AMPLE_CACHE, OUTPUT_LEN, SCARCE_CACHE, TINY_MODELS, VOCAB, generate

SETTINGS = {
    "one at a time": {**AMPLE_CACHE, "max_num_seqs": 1},
    "all at once": {"num_speculative_tokens": 3, **AMPLE_CACHE},
    "chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, **AMPLE_CACHE},
    "preempted": SCARCE_CACHE,
    "FP8 cache, chunked": {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 40, **AMPLE_CACHE},
    "no prefix cache, many drafts": {"prefix_caching": False, "num_speculative_tokens": 15, **AMPLE_CACHE},
    "two ranks": {"tensor_parallel_size": 2, **AMPLE_CACHE},
}
# The first model of each family.
MODELS = list({tiny.family: name for name, tiny in reversed(TINY_MODELS.items())}.values())
RECURRENT = next(name for name in MODELS if TINY_MODELS[name].family == "Qwen3Next")
# A sample of all pairs: each setting with some model, and all settings of one rank with recurrent layers.
PAIRS = sorted(
    {(name, list(SETTINGS)[index % len(SETTINGS)]) for index, name in enumerate(MODELS)}
    | {(RECURRENT, settings) for settings in SETTINGS}
)


def predict(answers: list[list[int]]) -> list[list[int]]:
    """The answers, in which every ninth token is wrong."""
    return [
        [(token + 1) % VOCAB if position % 9 == 8 else token for position, token in enumerate(answer)]
        for answer in answers
    ]


@pytest.mark.parametrize(("name", "setting"), PAIRS)
async def test_drafts_change_no_token(name, setting, tmp_path, device):
    write_tiny_checkpoint(name, tmp_path)
    settings, is_preempted = SETTINGS[setting], setting == "preempted"
    expected = await generate(tmp_path, device, {**settings, "tensor_parallel_size": 1}, is_preempted=is_preempted)
    assert len(expected[0]) == OUTPUT_LEN
    found = await generate(
        tmp_path,
        device,
        {"speculate": "ngram", **settings},
        is_preempted=is_preempted,
        predictions=predict(expected),
    )
    assert found == expected
