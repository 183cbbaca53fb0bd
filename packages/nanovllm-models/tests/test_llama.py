import json
import pickle

import torch
from safetensors.torch import save_file
from tiny_families import PROMPTS, make_checkpoint

import nanovllm_models


def test_a_tied_checkpoint_may_have_a_head_and_rotary_frequencies(tmp_path, session_class):
    theirs = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    expected = session_class(nanovllm_models.load(tmp_path)).step(PROMPTS)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    found = session_class(nanovllm_models.load(tmp_path)).step(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_spec_has_the_fields_of_the_engine_and_can_be_pickled(tmp_path, session_class):
    make_checkpoint(tmp_path, "llama", eos_token_id=[7, 9, 10**13])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    spec = nanovllm_models.load(tmp_path, served_name="tiny")
    assert (spec.name, spec.vocab_size, spec.max_position) == ("tiny", 96, 128)
    assert spec.eos_token_ids == (7, 9, 11)
    assert spec.dtype == torch.float32
    assert nanovllm_models.load(tmp_path).name == tmp_path.name
    expected, found = (session_class(each).step(PROMPTS)[0] for each in (spec, pickle.loads(pickle.dumps(spec))))
    assert torch.equal(found, expected)
