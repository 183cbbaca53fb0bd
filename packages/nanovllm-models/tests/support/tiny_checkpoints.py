"""Writes models of transformers as checkpoints with the published layout of each family.

Published layouts, from config.json and index files (July 2025 to January 2026):

    family       FP8 checkpoint                  FP8 tensors; other tensors are bf16                   scales
    llama        (third parties)                 q k v o, gate up down of every layer
    qwen2        (third parties)                 the same
    qwen3        Qwen/Qwen3-8B-FP8               the same                                              bf16
    qwen3_moe    Qwen/Qwen3-30B-A3B-FP8          q k v o, experts' gate up down; not mlp.gate          bf16
    qwen3_next   Qwen/Qwen3-Next-80B-A3B-*-FP8   the same, shared_expert, linear_attn.in_proj_qkvz     bf16
                                                 and out_proj; not in_proj_ba, conv1d, mlp.gate,
                                                 mlp.shared_expert_gate, mtp.fc
    minimax_m2   MiniMaxAI/MiniMax-M2            q k v o, experts' w1 w2 w3; the router's gate and     float32
                                                 e_score_correction_bias are float32
    deepseek_v3  deepseek-ai/DeepSeek-R1, V3     q_a q_b kv_a_with_mqa kv_b o, gate up down of dense   float32
                                                 layers, experts and shared_experts; not mlp.gate;
                                                 e_score_correction_bias is float32

Each quantised `x.weight` [N, K] has scales `x.weight_scale_inv` [ceil(N / 128), ceil(K / 128)].
`quantization_config` has quant_method fp8, activation_scheme dynamic, weight_block_size [128, 128], and fmt e4m3
(MiniMax: float8_e4m3fn). modules_to_not_convert depends on the publisher:

- Qwen lists full names of modules: lm_head, norms, routers.
- MiniMax lists ends of names: gate, e_score_correction_bias, lm_head.
- DeepSeek has no such list, although the routers are bf16.

Every expert has its own tensors, such as mlp.experts.3.gate_proj.weight. MiniMax's names are
block_sparse_moe.experts.3.w1.weight (gate), w3 (up) and w2 (down).

Multi-token prediction:

- qwen3_next: mtp.fc [H, 2 H], mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, and mtp.layers.0, a layer
  with full attention and experts. config.json does not mention this head.
- deepseek_v3: model.layers.61, an additional layer (`num_nextn_predict_layers` is 1). It also has embed_tokens, enorm,
  hnorm, eh_proj [H, 2 H], shared_head.norm and shared_head.head. embed_tokens and shared_head.head are copies of the
  model's tensors.
- minimax_m2: config.json mentions three modules (`use_mtp`, `num_mtp_modules`), but no weights are published.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight, dequantize, quantize_blocks

LINEAR = r"(q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|w[123]|in_proj_qkvz|out_proj"
QUANTIZED = re.compile(rf".*\.layers\.\d+\..*\.({LINEAR})\.weight")
FLOAT32 = re.compile(r".*(e_score_correction_bias|block_sparse_moe\.gate\.weight)")
BF16_SCALES = ("qwen3", "qwen3_moe", "qwen3_next")
# `modules_to_not_convert` by family. None: config.json has no such field. Other families: see `_quantization_config`.
KEPT = {
    "minimax_m2": ["gate", "e_score_correction_bias", "lm_head"],
    "deepseek_v3": None,
}
INDEX = "model.safetensors.index.json"


def write_checkpoint(
    path: Path,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    mtp: bool = False,
    num_shards: int = 3,
    old_config: bool = False,
) -> None:
    """Write `model` into the directory `path` in the layout of its family.

    dtype: dtype of the tensors that are not FP8.
    mtp: whether to add multi-token prediction with random weights.
    old_config: whether to write config.json in the format of transformers 4, which most published models have.
    """
    tensors, config = _read_saved_model(model)
    family = config["model_type"]
    if mtp:
        tensors |= dict(_mtp_tensors(family, config, tensors))
        if family == "deepseek_v3":
            config["num_nextn_predict_layers"] = 1
    tensors = {name: tensor.to(torch.float32 if FLOAT32.fullmatch(name) else dtype) for name, tensor in tensors.items()}
    if fp8:
        tensors = dict(_quantize(tensors, torch.bfloat16 if family in BF16_SCALES else torch.float32))
        config["quantization_config"] = _quantization_config(family, tensors)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_to_transformers_4(config) if old_config else config, indent=2))
    _write_shards(path, tensors, num_shards)


def write_twin(source: Path, target: Path) -> None:
    """Write the FP8 checkpoint in `source` to `target` in float32."""
    tensors = read_tensors(source)
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = dequantize(BlockFP8Weight(tensor, tensors[f"{name}_scale_inv"].float()))
        plain[name] = tensor.float()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    (target / "config.json").write_text(json.dumps(config))
    _write_shards(target, plain, 1)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a sharded checkpoint, by name."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        with safe_open(path / shard, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    assert set(tensors) == set(weight_map)
    return tensors


def _read_saved_model(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict]:
    """Return the model's tensors by their published names, and the fields of its config.json."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model.save_pretrained(directory, max_shard_size="100GB")
        tensors = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
    fused = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert not fused, f"transformers no longer writes each expert as a separate tensor: {fused[0]}"
    return tensors, config


def _mtp_tensors(family: str, config: dict, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    hidden_size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    if family == "qwen3_next":
        template_index, head_prefix = config["layer_types"].index("full_attention"), "mtp.layers.0"
        norms, projection = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), "mtp.fc"
    elif family == "deepseek_v3":
        template_index, head_prefix = num_layers - 1, f"model.layers.{num_layers}"
        norms, projection = (
            (f"{head_prefix}.enorm", f"{head_prefix}.hnorm", f"{head_prefix}.shared_head.norm"),
            f"{head_prefix}.eh_proj",
        )
        yield f"{head_prefix}.embed_tokens.weight", tensors["model.embed_tokens.weight"].clone()
        yield f"{head_prefix}.shared_head.head.weight", tensors["lm_head.weight"].clone()
    else:
        raise ValueError(f"{family} is published without heads for multi-token prediction")
    for norm in norms:
        yield f"{norm}.weight", 1 + 0.1 * torch.randn(hidden_size)
    yield f"{projection}.weight", torch.randn(hidden_size, 2 * hidden_size) * 0.1
    prefix = f"model.layers.{template_index}."
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            yield f"{head_prefix}.{name.removeprefix(prefix)}", torch.randn(tensor.shape) * 0.1


def _quantize(tensors: dict[str, Tensor], scale_dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if QUANTIZED.fullmatch(name) is None:
            yield name, tensor
            continue
        data, scales = quantize_blocks(tensor)
        yield name, data
        yield f"{name}_scale_inv", scales.to(scale_dtype)


def _quantization_config(family: str, tensors: dict[str, Tensor]) -> dict:
    # Qwen lists all modules without FP8 weights, except the embedding.
    names = (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    unquantised = [name for name in names if f"{name}.weight_scale_inv" not in tensors and "embed_tokens" not in name]
    kept = KEPT.get(family, unquantised)
    return {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn" if family == "minimax_m2" else "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        **({} if kept is None else {"modules_to_not_convert": kept}),
    }


def _to_transformers_4(config: dict) -> dict:
    """Return `config` with the fields of transformers 4 in place of those of transformers 5."""
    config = {**config, "torch_dtype": config["dtype"]}
    del config["dtype"]
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    partial = rope.pop("partial_rotary_factor", None)
    # MiniMax writes only rotary_dim.
    if partial is not None and "rotary_dim" not in config:
        config["partial_rotary_factor"] = partial
    config["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    return config


def _write_shards(path: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    """Write `num_shards` files of sorted names. As published, a weight and its scales may be in different files."""
    names = sorted(tensors)
    shard_size = -(-len(names) // num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * shard_size : (shard + 1) * shard_size]
        save_file({name: tensors[name].contiguous() for name in part}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
