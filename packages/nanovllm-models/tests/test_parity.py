"""Every model family with tiny random checkpoints."""

import json

import pytest
import torch
from tiny_families import DEEPSEEK_YARN, FAMILIES, PROMPTS, make_checkpoint
from torch._dynamo.testing import CompileCounterWithBackend

import nanovllm_models
from nanovllm_core.layers import compilation
from nanovllm_models import deepseek_v3, llama, qwen3_next

# transformers adds the terms of Qwen3-Next's recurrence in another order.
TOLERANCES = dict.fromkeys(FAMILIES, 1e-4) | {"qwen3_next": 2e-4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
WIDE = {"head_dim": 16}
TIED = {"tie_word_embeddings": True}
DENSE = {"first_k_dense_replace": 3}
VARIANTS = {
    "llama": {
        "gqa": {},
        "gqa, tied": TIED,
        "mha, tied": {"num_key_value_heads": 4} | TIED,
        "mqa, wide heads": {"num_key_value_heads": 1, "head_dim": 16},
        "llama3 scaling": {"rope_parameters": LLAMA3},
        "yarn": {"rope_parameters": YARN},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "sharded": {"max_shard_size": "8KB"},
        "theta and eps": {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
            "rms_norm_eps": 1e-2,
        },
    },
    "qwen2": {
        "gqa": {},
        "tied, windows in no layer": {"num_key_value_heads": 4, "use_sliding_window": True, "max_window_layers": 3}
        | TIED,
    },
    "qwen3": {
        "gqa": {},
        "tied, biases": {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True} | TIED,
    },
    "qwen3_moe": {
        "wide heads": WIDE,
        "renormalised": {"norm_topk_prob": True, "attention_bias": True} | WIDE,
        "every second layer, tied": {"decoder_sparse_step": 2} | TIED | WIDE,
        "two dense layers, sharded": {"mlp_only_layers": [0, 2], "max_shard_size": "8KB"} | WIDE,
        "default head size": {},
    },
    "minimax_m2": {
        "half of heads rotated": {"rotary_dim": 8},
        "whole heads": {},
        "whole heads, tied": {"num_experts_per_tok": 1} | TIED,
        "all experts": {"rotary_dim": 6, "num_experts_per_tok": 8},
    },
    "qwen3_next": {
        "as published": {},
        "every second layer, tied, biases": {
            "full_attention_interval": 2,
            "attention_bias": True,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 8,
        }
        | TIED,
        "layers by type, two dense, weights not renormalised": {
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [0, 3],
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 2,
            "shared_expert_intermediate_size": 24,
        },
        "every second layer has experts": {
            "decoder_sparse_step": 2,
            "linear_num_value_heads": 6,
            "num_key_value_heads": 1,
        },
        "rotated by half": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
            "rms_norm_eps": 1e-2,
        },
        "six layers": {"num_hidden_layers": 6, "full_attention_interval": 3},
    },
    "deepseek_v3": {
        "as published": {"rope_parameters": DEEPSEEK_YARN},
        "dense": DENSE,
        "two dense layers": {"num_hidden_layers": 5, "first_k_dense_replace": 2},
        "no rank of queries": {"q_lora_rank": None} | DENSE,
        "tied, biases": {"attention_bias": True} | TIED,
        "not interleaved": {"rope_interleave": False} | DENSE,
        "yarn without mscale": {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0}
            | {"original_max_position_embeddings": 16, "attention_factor": 1.1},
        }
        | DENSE,
        "all experts": {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
        "weights not renormalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
    },
}


@pytest.mark.parametrize(
    ("family", "variant"),
    # Six layers of Qwen3-Next amplify rounding errors beyond the tolerance.
    [(family, name) for family in VARIANTS for name in VARIANTS[family] if name != "six layers"],
)
def test_same_logits_and_tokens_as_transformers(family, variant, tmp_path, session_class):
    theirs = make_checkpoint(tmp_path, family, **VARIANTS[family][variant])
    ours = session_class(nanovllm_models.load(tmp_path))
    sequences = new_tokens = PROMPTS
    for _ in range(10):
        logits = ours.step(new_tokens)
        for sequence, last_tokens, found in zip(sequences, new_tokens, logits, strict=True):
            with torch.no_grad():
                expected = theirs(torch.tensor([sequence])).logits[0, -len(last_tokens) :]
            torch.testing.assert_close(found, expected, atol=TOLERANCES[family], rtol=TOLERANCES[family])
            assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
        new_tokens = [[int(found[-1].argmax())] for found in logits]
        sequences = [sequence + last_tokens for sequence, last_tokens in zip(sequences, new_tokens, strict=True)]


@pytest.mark.parametrize(
    ("family", "variant", "num_kinds"),
    [
        ("llama", "mha, tied", 1),
        ("llama", "biases", 1),
        ("qwen3", "gqa", 1),
        ("qwen3_moe", "wide heads", 1),
        ("qwen3_moe", "two dense layers, sharded", 2),
        ("minimax_m2", "half of heads rotated", 1),
        ("qwen3_next", "six layers", 3),
        ("deepseek_v3", "two dense layers", 2),
    ],
)
def test_each_kind_of_layer_is_compiled_once(family, variant, num_kinds, tmp_path, session_class, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compilation, "BACKEND", counter)
    for module in (llama, qwen3_next, deepseek_v3):
        monkeypatch.setattr(module, "MIN_COMPILED_ROWS", 9)
    make_checkpoint(tmp_path, family, **VARIANTS[family][variant])
    spec = nanovllm_models.load(tmp_path)
    plain, fast = session_class(spec), session_class(spec, compiled=True)
    for index, step in enumerate(([PROMPTS[1]], [[5], PROMPTS[0]], [[6], [7]], [[1], list(range(20))])):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            for found, expected in zip(fast.step(step), plain.step(step), strict=True):
                torch.testing.assert_close(found, expected, atol=TOLERANCES[family], rtol=TOLERANCES[family])
    assert counter.frame_count == num_kinds


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "gqa"),
        ("qwen3_moe", "wide heads"),
        ("minimax_m2", "half of heads rotated"),
        ("deepseek_v3", "as published"),
    ],
)
def test_chunked_prefill_gives_the_same_logits(family, variant, tmp_path, session_class):
    make_checkpoint(tmp_path, family, **VARIANTS[family][variant])
    spec = nanovllm_models.load(tmp_path)
    whole = session_class(spec).step([PROMPTS[1]])[0]
    chunked = session_class(spec)
    parts = [chunked.step([PROMPTS[1][begin : begin + 13]])[0] for begin in range(0, len(PROMPTS[1]), 13)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "rope", "type_field", "added"),
    [
        ("llama", LLAMA3, "rope_type", {}),
        (
            "deepseek_v3",
            DEEPSEEK_YARN,
            "type",
            {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        ),
    ],
    ids=["llama", "deepseek_v3"],
)
def test_configs_of_transformers_4_and_5_are_equivalent(family, rope, type_field, added, tmp_path, session_class):
    make_checkpoint(tmp_path, family, rope_parameters=rope)
    expected = session_class(nanovllm_models.load(tmp_path)).step(PROMPTS)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    fields["torch_dtype"] = fields.pop("dtype")
    fields["rope_theta"] = rope.pop("rope_theta")
    rope[type_field] = rope.pop("rope_type")
    file.write_text(json.dumps(fields | {"rope_scaling": rope} | added))
    found = session_class(nanovllm_models.load(tmp_path)).step(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "variant", "min_similarity", "share"),
    [
        ("llama", "gqa, tied", 0.99, 1),
        # In bfloat16, some tokens choose other experts.
        ("qwen3_moe", "wide heads", 0.99, 0.85),
        ("minimax_m2", "whole heads", 0.99, 0.85),
        ("qwen3_next", "as published", 0.98, 0.8),
        ("deepseek_v3", "dense", 0.99, 1),
    ],
)
def test_bfloat16_logits_are_near_float32_logits(family, variant, min_similarity, share, tmp_path, session_class):
    make_checkpoint(tmp_path, family, **VARIANTS[family][variant])
    spec = nanovllm_models.load(tmp_path)
    exact, coarse = (torch.cat(session_class(spec, dtype).step(PROMPTS)) for dtype in (torch.float32, torch.bfloat16))
    assert coarse.dtype == torch.float32
    similar = torch.nn.functional.cosine_similarity(coarse, exact, dim=-1)
    assert (similar > min_similarity).float().mean() >= share


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_depend_on_the_seed(family, tmp_path, session_class):
    make_checkpoint(tmp_path, family)
    first, second = (
        session_class(nanovllm_models.load(tmp_path, load_format="dummy", seed=seed)).step(PROMPTS)[0]
        for seed in (1, 2)
    )
    assert first.isfinite().all()
    assert not torch.equal(first, second)
