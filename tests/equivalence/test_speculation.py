"""Answers with drafts equal answers without drafts, for every model family."""

from pathlib import Path

import pytest
import torch
from rank_matrix import write_tiny_checkpoint
from safetensors.torch import load_file, save_file
from samples import sample_pairs
from tiny_models import AMPLE_CACHE, OUTPUT_LEN, SCARCE_CACHE, TIERED_CACHE, TINY_MODELS, generate, make_predictions

from nanovllm_core import ConfigError
from nanovllm_core.engine import build
from nanovllm_core.scheduling.draft_times import DraftTimes

# Draft models and heads propose nothing in steps with prompts. With more than two requests at once, nearly all steps
# would have prompts.
SMALL_CHUNKS = {**AMPLE_CACHE, "max_num_batched_tokens": 40, "max_num_seqs": 2}
SETTINGS = {
    "one at a time": {**AMPLE_CACHE, "max_num_seqs": 1},
    "all at once": {"num_speculative_tokens": 3, **AMPLE_CACHE},
    "chunked, depth 1": {"depth": 1, **SMALL_CHUNKS},
    "preempted": SCARCE_CACHE,
    "preempted, from host memory": TIERED_CACHE,
    "FP8 cache, chunked": {"kv_cache_dtype": "fp8", **SMALL_CHUNKS},
    "no prefix cache, many drafts": {"prefix_caching": False, "num_speculative_tokens": 15, **AMPLE_CACHE},
    "two ranks": {"tensor_parallel_size": 2, **AMPLE_CACHE},
}
# The first model of each family.
MODELS = list({tiny.family: name for name, tiny in reversed(TINY_MODELS.items())}.values())
RECURRENT = next(name for name in MODELS if TINY_MODELS[name].family == "Qwen3Next")
PAIRS = sorted({*sample_pairs(MODELS, SETTINGS, 1), *sample_pairs([RECURRENT], SETTINGS, 3)})

SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.7, "logit_bias": {7: 2.0, 40: -100.0}, "logprobs": 2},
)
DRAFT_PAIRS = sorted({*sample_pairs(MODELS, SETTINGS, 1, first=1), *sample_pairs(["Qwen2"], SETTINGS, 3, first=5)})
HEAD_PAIRS = sample_pairs([name for name in MODELS if TINY_MODELS[name].has_mtp], SETTINGS, 4)


@pytest.fixture
def always_drafts(monkeypatch):
    """Steps propose as many drafts as they may, because all measured times are 0."""
    monkeypatch.setattr(build, "measure_draft_times", lambda *_: DraftTimes())


def write_draft_model(name: str, draft_path: Path) -> None:
    """Writes a disturbed copy of the model. The draft model of RECURRENT is a disturbed Qwen3."""
    write_tiny_checkpoint("Qwen3" if name == RECURRENT else name, draft_path)
    torch.manual_seed(0)
    for file in draft_path.glob("*.safetensors"):
        tensors = load_file(file)
        if (norm := tensors.get("model.norm.weight")) is not None:
            tensors["model.norm.weight"] = norm + torch.randn_like(norm) * 0.2
            save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(("name", "setting"), PAIRS)
async def test_drafts_change_no_token(name, setting, tmp_path, device, always_drafts):
    write_tiny_checkpoint(name, tmp_path)
    settings, is_preempted = SETTINGS[setting], setting.startswith("preempted")
    expected = await generate(tmp_path, device, {**settings, "tensor_parallel_size": 1}, is_preempted=is_preempted)
    assert len(expected[0]) == OUTPUT_LEN
    found = await generate(
        tmp_path,
        device,
        {"speculate": "ngram", **settings},
        is_preempted=is_preempted,
        predictions=make_predictions(expected),
    )
    assert found == expected


async def check_drafts(path: Path, device: str, method: str, setting: str, draft: Path | None = None) -> None:
    settings, is_preempted = SETTINGS[setting], setting.startswith("preempted")
    one_rank = {**settings, "tensor_parallel_size": 1}
    expected_logprobs, logprobs = list[list[float]](), list[list[float]]()
    options = {"is_preempted": is_preempted, "samplings": SAMPLINGS}
    expected = await generate(path, device, one_rank, **options, logprobs=expected_logprobs)
    settings = {"speculate": method, **settings}
    found = await generate(path, device, settings, **options, draft=draft, logprobs=logprobs)
    assert found == expected
    # Other batches round sums differently. With an FP8 cache, this changes log-probabilities by up to 0.03.
    atol = 0.1 if settings.get("kv_cache_dtype") == "fp8" else 1e-3
    torch.testing.assert_close(logprobs, expected_logprobs, atol=atol, rtol=0)


@pytest.mark.parametrize(("name", "setting"), DRAFT_PAIRS)
async def test_draft_model_changes_no_token(name, setting, tmp_path, device, always_drafts):
    write_tiny_checkpoint(name, tmp_path / "model")
    write_draft_model(name, tmp_path / "draft")
    await check_drafts(tmp_path / "model", device, "draft", setting, tmp_path / "draft")


@pytest.mark.parametrize(("name", "setting"), HEAD_PAIRS)
async def test_heads_change_no_token(name, setting, tmp_path, device, always_drafts):
    write_tiny_checkpoint(name, tmp_path)
    await check_drafts(tmp_path, device, "mtp", setting)


async def test_mtp_is_refused_for_a_checkpoint_without_heads(tmp_path, device):
    write_tiny_checkpoint("MiniMax-M2", tmp_path)
    with pytest.raises(ConfigError, match="speculate is 'mtp', but the checkpoint has no heads"):
        await generate(tmp_path, device, {"speculate": "mtp", **AMPLE_CACHE})
