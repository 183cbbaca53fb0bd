"""An engine with speculation gives the answers of an engine without it."""

import asyncio
from dataclasses import replace

import grammars
import pytest
import sampled_answers
from sampled_answers import answer_all, compare_answers

from nanovllm_core import EngineConfig

CONFIG = EngineConfig(device="cpu", num_blocks=64, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=48)
# Half of the prompts repeat, so that drafts are proposed from the first token on.
PROMPTS = [*sampled_answers.PROMPTS[:3], [11, 12, 13] * 6, [*range(20, 32), *range(20, 30)]]


@pytest.mark.parametrize(
    ("num_blocks", "depth", "num_drafts", "num_ranks"), [(64, 1, 5, 1), (18, 2, 3, 1), (64, 2, 15, 1), (64, 1, 4, 2)]
)
def test_ngram_drafts_change_no_answer(num_blocks, depth, num_drafts, num_ranks, monkeypatch):
    monkeypatch.setattr(sampled_answers, "PROMPTS", PROMPTS)
    config = replace(CONFIG, num_blocks=num_blocks, depth=depth)
    vetter = grammars.SharedVetter()
    vetter.use(monkeypatch)
    try:
        expected = asyncio.run(answer_all(config))
        speculating = replace(
            config, speculate="ngram", num_speculative_tokens=num_drafts, tensor_parallel_size=num_ranks
        )
        found = asyncio.run(answer_all(speculating))
    finally:
        vetter.end()
    compare_answers(found, expected)
    finals = [outputs[-1] for outputs in found.values()]
    assert sum(final.num_accepted_drafts for final in finals) > 20
    assert sum(final.num_rejected_drafts for final in finals) > 20
