"""Checkpoints that declare heads for multi-token prediction (MTP) load without these heads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import PROMPTS, make_checkpoint

import nanovllm_models
from nanovllm_core.layers.weights import WeightError

DECLARATIONS = {
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "qwen3_next": {"num_nextn_predict_layers": 1},
    "minimax_m2": {"use_mtp": True, "num_mtp_modules": 3},
}


def declare(path, fields):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("uses_mtp", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("family", DECLARATIONS)
def test_heads_without_weights_are_left_out_with_a_log_line(family, uses_mtp, tmp_path, session, caplog):
    make_checkpoint(tmp_path, family)
    expected = session(nanovllm_models.load(tmp_path)).step(PROMPTS)
    assert "multi-token" not in caplog.text
    declare(tmp_path, DECLARATIONS[family])
    with caplog.at_level("INFO"):
        ours = session(nanovllm_models.load(tmp_path), uses_mtp=uses_mtp)
    (record,) = [record for record in caplog.records if "multi-token prediction" in record.getMessage()]
    assert record.getMessage().endswith("speculative decoding with these heads is off")
    assert all(torch.equal(*logits) for logits in zip(ours.step(PROMPTS), expected, strict=True))


def test_weights_of_declared_modules_of_minimax_m2_are_skipped(tmp_path, session):
    make_checkpoint(tmp_path, "minimax_m2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    num_layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    save_file(tensors | {f"model.layers.{num_layers}.enorm.weight": torch.zeros(3)}, file)
    with pytest.raises(WeightError, match="the model has no such weight"):
        session(nanovllm_models.load(tmp_path))
    declare(tmp_path, DECLARATIONS["minimax_m2"])
    session(nanovllm_models.load(tmp_path))


def test_modules_that_minimax_m2_turns_off_are_not_declared(tmp_path, session, caplog):
    make_checkpoint(tmp_path, "minimax_m2")
    declare(tmp_path, {"use_mtp": False, "num_mtp_modules": 3})
    with caplog.at_level("INFO"):
        session(nanovllm_models.load(tmp_path))
    assert "multi-token" not in caplog.text
