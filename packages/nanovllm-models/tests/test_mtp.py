"""Heads for multi-token prediction (MTP): checkpoints with and without them, and logits against transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import read_tensors, write_checkpoint
from tiny_families import PROMPTS, make_checkpoint, make_model
from torch import Tensor
from torch.nn import functional

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
def test_heads_without_weights_are_left_out_with_a_log_line(family, uses_mtp, tmp_path, session_class, caplog):
    make_checkpoint(tmp_path, family)
    expected = session_class(nanovllm_models.load(tmp_path)).step(PROMPTS)
    assert "multi-token" not in caplog.text
    declare(tmp_path, DECLARATIONS[family])
    with caplog.at_level("INFO"):
        ours = session_class(nanovllm_models.load(tmp_path), uses_mtp=uses_mtp)
    (record,) = [record for record in caplog.records if "multi-token prediction" in record.getMessage()]
    assert record.getMessage().endswith("`--speculate mtp` is not available")
    assert all(torch.equal(*logits) for logits in zip(ours.step(PROMPTS), expected, strict=True))


def test_weights_of_declared_modules_of_minimax_m2_are_skipped(tmp_path, session_class):
    make_checkpoint(tmp_path, "minimax_m2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    num_layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    save_file(tensors | {f"model.layers.{num_layers}.enorm.weight": torch.zeros(3)}, file)
    with pytest.raises(WeightError, match="the model has no such weight"):
        session_class(nanovllm_models.load(tmp_path))
    declare(tmp_path, DECLARATIONS["minimax_m2"])
    session_class(nanovllm_models.load(tmp_path))


def test_modules_that_minimax_m2_turns_off_are_not_declared(tmp_path, session_class, caplog):
    make_checkpoint(tmp_path, "minimax_m2")
    declare(tmp_path, {"use_mtp": False, "num_mtp_modules": 3})
    with caplog.at_level("INFO"):
        session_class(nanovllm_models.load(tmp_path))
    assert "multi-token" not in caplog.text


# Names in checkpoints: embedding norm, hidden-state norm, result norm, projection, decoder layer, output head.
# The last item is the index of a decoder layer of the same kind.
HEADS = {
    "deepseek_v3": ("enorm", "hnorm", "shared_head.norm", "eh_proj", "", "model.layers.3.shared_head.head", 2),
    "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc", "layers.0.", "lm_head", 3),
}
PREFIXES = {"deepseek_v3": "model.layers.3.", "qwen3_next": "mtp."}


class HeadOracle:
    """The head in plain torch, with a decoder layer of transformers. Source: DeepSeek-V3, section 2.2."""

    def __init__(self, family: str, model, tensors: dict[str, Tensor]):
        *norms, projection, layer_prefix, output_head, replaced_layer_index = HEADS[family]
        prefix = PREFIXES[family]
        self._norm_offset = 1 if family == "qwen3_next" else 0
        self._norms = [tensors[f"{prefix}{norm}.weight"] + self._norm_offset for norm in norms]
        self._projection = tensors[f"{prefix}{projection}.weight"]
        self._output_head = tensors[f"{output_head}.weight"]
        self._model = model.model
        self._replaced_layer_index = replaced_layer_index
        # transformers can't load a head, so `write_layer` replaces a decoder layer by the head's layer.
        self._layer_tensors = {
            name.removeprefix(prefix + layer_prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix + layer_prefix)
        }

    def write_layer(self, path: Path, tensors: dict[str, Tensor]) -> None:
        prefix = f"model.layers.{self._replaced_layer_index}."
        layer = {name: self._layer_tensors[name.removeprefix(prefix)] for name in tensors if name.startswith(prefix)}
        save_file({name: tensor.contiguous() for name, tensor in (tensors | layer).items()}, path)

    def predict(self, layers, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return the head's hidden states and logits for each of `tokens` except the first."""
        ids, eps = torch.tensor([tokens]), self._model.config.rms_norm_eps
        hidden = self._model(ids[:, :-1]).last_hidden_state[0]
        size = (hidden.shape[1],)
        embedded = self._model.embed_tokens(ids[0, 1:])
        normed = (
            functional.rms_norm(embedded, size, self._norms[0], eps),
            functional.rms_norm(hidden, size, self._norms[1], eps),
        )
        x = functional.linear(torch.cat(normed, 1), self._projection)[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        rotation = self._model.rotary_emb(x, positions)
        x = layers[self._replaced_layer_index](
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotation
        )
        x = (x[0] if isinstance(x, tuple) else x)[0]
        result = functional.rms_norm(x, size, self._norms[2], eps)
        # Only Qwen3-Next's head returns normed hidden states.
        return (result if self._norm_offset else x), functional.linear(result, self._output_head)


@pytest.mark.parametrize("family", HEADS)
@torch.inference_mode()
def test_predictions_of_heads_equal_the_oracle(family, tmp_path, session_class):
    model = make_model(family)
    write_checkpoint(tmp_path / "ours", model, mtp=True, num_shards=1)
    make_checkpoint(tmp_path / "layer", family)
    oracle = HeadOracle(family, model, read_tensors(tmp_path / "ours"))
    oracle.write_layer(tmp_path / "layer" / "model.safetensors", load_file(tmp_path / "layer" / "model.safetensors"))
    layers = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "layer").eval().model.layers
    ours = session_class(nanovllm_models.load(tmp_path / "ours"), uses_mtp=True)
    found = ours.predict([prompt[:-1] for prompt in PROMPTS], [prompt[1:] for prompt in PROMPTS])
    for prompt, results in zip(PROMPTS, found, strict=True):
        expected = oracle.predict(layers, prompt)
        for tensor, expected_tensor in zip(results, expected, strict=True):
            torch.testing.assert_close(tensor, expected_tensor, atol=2e-4, rtol=2e-4)
