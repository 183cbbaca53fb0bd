"""Mixtures of experts: FP8 checkpoints, and errors that name the wrong tensor or field."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_checkpoint, write_twin
from tiny_families import make_checkpoint, make_model

import nanovllm_models
from nanovllm_core.layers.weights import WeightError
from nanovllm_kernels.gemm.block_fp8 import GROUP, quantize_groups
from nanovllm_models import minimax_m2, qwen3_moe
from nanovllm_models.fields import read_fields

QWEN3, MINIMAX = "qwen3_moe", "minimax_m2"


@pytest.mark.parametrize(
    ("family", "expert"),
    [
        (QWEN3, "model.layers.1.mlp.experts.5.up_proj.weight"),
        (MINIMAX, "model.layers.1.block_sparse_moe.experts.5.w3.weight"),
    ],
    ids=["qwen3_moe", "minimax_m2"],
)
def test_missing_and_misshapen_expert_tensors_are_named(family, expert, tmp_path, session_class):
    make_checkpoint(tmp_path, family)
    spec = nanovllm_models.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(WeightError) as caught:
            session_class(spec)
        return str(caught.value)

    missing = copy.copy(tensors)
    del missing[expert]
    assert f"lacks 1 of {len(tensors)} tensors: {expert} [24, 32]" in refusal(missing)
    extra = expert.replace(".5.", ".8.")
    assert f"{extra} [24, 32] is in the checkpoint" in refusal(tensors | {extra: tensors[expert].clone()})
    assert f"{expert} has shape [24, 31]" in refusal(tensors | {expert: torch.ones(24, 31)})


def round_input(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    x, *others = inputs
    numbers, scales = quantize_groups(x.flatten(0, -2))
    rounded = numbers.float() * scales.repeat_interleave(GROUP, 1)[:, : x.shape[-1]]
    return (rounded.view(x.shape), *others)


class RoundingExperts(torch.nn.Module):
    def __init__(self, plain: torch.nn.Module):
        super().__init__()
        self.plain = plain

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (rounded,) = round_input(self, (x,))
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            tokens, slots = torch.where(ids == expert)
            gate, up = (rounded[tokens] @ self.plain.gate_up_proj[expert].T).chunk(2, -1)
            (hidden,) = round_input(self, (torch.nn.functional.silu(gate) * up,))
            out.index_add_(0, tokens, hidden @ self.plain.down_proj[expert].T * weights[tokens, slots, None])
        return out


@pytest.mark.parametrize(
    ("family", "changes"),
    [(QWEN3, {"mlp_only_layers": [0, 2], "head_dim": 16}), (MINIMAX, {"rotary_dim": 8})],
    ids=["qwen3_moe-two dense layers", "minimax_m2"],
)
def test_fp8_checkpoints_give_the_logits_of_their_float32_twin(family, changes, tmp_path, session_class):
    model = make_model(family, **changes, hidden_size=96, initializer_range=0.1)
    write_checkpoint(tmp_path / "fp8", model, fp8=True, old_config=True)
    write_twin(tmp_path / "fp8", tmp_path / "twin")
    ours = session_class(nanovllm_models.load(tmp_path / "fp8"))
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "twin").eval()
    for module in [module for module in twin.modules() if hasattr(module, "experts")]:
        module.experts = RoundingExperts(module.experts)
    for part, module in twin.named_modules():
        if part.endswith("_proj"):
            module.register_forward_pre_hook(round_input)
    prompts = [[first, 95 - 2 * first, 40 + first] for first in range(32)]
    with torch.no_grad():
        expected = twin(torch.tensor(prompts)).logits
    errors = (torch.stack(ours.step(prompts)) - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    # Another order of a sum may change a rounding, which may change the chosen experts.
    assert errors.quantile(0.6) < 1e-4
    assert errors.max() < 0.5


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (QWEN3, {"num_experts_per_tok": 9}, "num_experts_per_tok of .* is 9, but must be at most num_experts, 8"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step of .* is 0, but must be an integer above 0"),
        (QWEN3, {"mlp_only_layers": [-1]}, "mlp_only_layers of .*, but must be a list of integers of at least 0"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window of .* is true, but must be false"),
        (MINIMAX, {"num_experts_per_tok": 9}, "num_experts_per_tok of .* is 9, but must be at most num_local_experts"),
        (MINIMAX, {"scoring_func": "softmax"}, 'scoring_func of .* is "softmax", but must be sigmoid'),
        (MINIMAX, {"use_routing_bias": False}, "use_routing_bias of .* is false, but must be true"),
        (MINIMAX, {"qk_norm_type": "per_head"}, 'qk_norm_type of .* is "per_head", but must be per_layer'),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm of .* is false, but must be true"),
        (MINIMAX, {"attn_type_list": [1, 0, 1]}, "attn_type_list of .*, but must be 1 for each layer"),
        (MINIMAX, {"rope_parameters": None, "rotary_dim": 7}, "rotary_dim of .* is 7, but must be even"),
        (MINIMAX, {"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor of .* is 0.2, but must"),
    ],
)
def test_the_error_for_an_unsupported_config_names_the_field(family, changes, message, tmp_path):
    make_checkpoint(tmp_path, family)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(nanovllm_models.ModelError, match=message):
        nanovllm_models.load(tmp_path)


@pytest.mark.parametrize(("module", "config_class"), [(qwen3_moe, "Qwen3MoeConfig"), (minimax_m2, "MiniMaxM2Config")])
def test_fields_left_out_have_the_defaults_of_transformers(module, config_class, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    fields = read_fields(tmp_path / "config.json")
    ours, theirs = module.parse_config(fields), getattr(transformers, config_class)()
    names = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"} | {
        *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    }
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rotary.theta == theirs.rope_parameters["rope_theta"]
    moe_config = module.parse_moe_config(fields, *([24] if module is qwen3_moe else []))
    assert (moe_config.num_experts, moe_config.routing.top_k) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    if module is qwen3_moe:
        assert moe_config.intermediate_size == theirs.moe_intermediate_size
        assert moe_config.routing.renormalize == theirs.norm_topk_prob
        assert moe_config.sparse_layers == frozenset(range(24))
