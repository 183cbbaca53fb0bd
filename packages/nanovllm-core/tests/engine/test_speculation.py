"""An engine with speculation gives the answers of an engine without it, whatever the sampling options."""

import asyncio
from dataclasses import replace

import pytest
import sampled_answers
from sampled_answers import answer_all, compare_answers

from nanovllm_core import EngineConfig, RequestOutput

CONFIG = EngineConfig(device="cpu", num_blocks=64, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=48)
# Half of the prompts repeat, so that drafts are proposed from the first token on.
PROMPTS = [*sampled_answers.PROMPTS[:2], [11, 12, 13] * 6, [*range(20, 32), *range(20, 30)]]


@pytest.fixture(scope="module")
def expected(vetter) -> dict[str, list[RequestOutput]]:
    """The answers of an engine without speculation, with memory for all requests."""
    with pytest.MonkeyPatch.context() as patch:
        vetter.use(patch)
        return asyncio.run(answer_all(CONFIG, PROMPTS))


@pytest.mark.parametrize(
    ("num_blocks", "depth", "num_drafts", "num_ranks"), [(18, 2, 3, 1), (64, 2, 15, 1), (64, 1, 4, 2)]
)
def test_ngram_drafts_change_no_answer(num_blocks, depth, num_drafts, num_ranks, expected, vetter, monkeypatch):
    vetter.use(monkeypatch)
    settings = {"speculate": "ngram", "num_speculative_tokens": num_drafts, "tensor_parallel_size": num_ranks}
    found = asyncio.run(answer_all(replace(CONFIG, num_blocks=num_blocks, depth=depth, **settings), PROMPTS))
    compare_answers(found, expected)
    finals = [outputs[-1] for outputs in found.values()]
    assert sum(final.num_accepted_drafts for final in finals) > 20
    assert sum(final.num_rejected_drafts for final in finals) > 20
