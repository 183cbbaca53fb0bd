import re

import pytest
import torch
from rank_results import add_up
from torch import nn

from nanovllm_core.layers.attention import qkv_parts
from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, find_quantization
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.weights import WeightError, fill_random, load_weights
from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight, dequantize, linear, quantize_blocks

FP8 = BlockFP8()


def make_quantized_tensors(name, rows, width):
    data, scales = quantize_blocks(torch.randn(rows, width))
    scales = scales * torch.rand(scales.shape).add(0.5)
    return {f"{name}.weight": data, f"{name}.weight_scale_inv": scales}


def dequantize_modules(tensors, *names):
    weights = [BlockFP8Weight(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]) for name in names]
    return torch.cat([dequantize(weight) for weight in weights])


def load_layer(layer, tensors):
    load_weights(nn.ModuleDict({"layer": layer}), tensors.items())
    return layer


@pytest.mark.parametrize("sizes", [(256, 128, 128), (192, 64, 64), (96, 40, 40), (300,), (5, 3)])
def test_parts_keep_their_own_blocks(build, sizes):
    parts = tuple(LinearPart(f"p{index}", size) for index, size in enumerate(sizes))
    tensors = {
        name: t for part in parts for name, t in make_quantized_tensors(part.name, part.out_features, 200).items()
    }
    layer = load_layer(ColumnParallelLinear(200, parts, build, quantization=FP8), tensors)
    assert layer.weight.data.dtype == torch.float8_e4m3fn
    assert torch.equal(dequantize(layer.weight), dequantize_modules(tensors, *(part.name for part in parts)))


@pytest.mark.parametrize("sizes", [(512, 256), (192, 64), (320, 24)])
def test_ranks_keep_the_scales_of_their_rows(ranks, sizes):
    parts = tuple(LinearPart(f"p{index}", size, bias=True) for index, size in enumerate(sizes))
    tensors = {
        name: t for part in parts for name, t in make_quantized_tensors(part.name, part.out_features, 130).items()
    }
    tensors |= {f"{part.name}.bias": torch.randn(part.out_features) for part in parts}
    found = [load_layer(ColumnParallelLinear(130, parts, build, quantization=FP8), tensors) for build in ranks(2)]
    for index, part in enumerate(parts):
        shares = [dequantize(layer.weight).split([size // 2 for size in sizes])[index] for layer in found]
        assert torch.equal(torch.cat(shares), dequantize_modules(tensors, part.name))


def test_row_parallel_ranks_split_whole_blocks(ranks, build):
    tensors = make_quantized_tensors("layer", 200, 512)
    x, residual = torch.randn(3, 512), torch.randn(3, 200)
    layer = load_layer(RowParallelLinear(512, 200, build, quantization=FP8), tensors)
    expected = layer(x, ResidualStream(residual.clone())).residual
    streams = []
    for rank_build, share in zip(ranks(2), x.chunk(2, 1), strict=True):
        layer = load_layer(RowParallelLinear(512, 200, rank_build, quantization=FP8), tensors)
        streams.append(layer(share.contiguous(), ResidualStream(residual)))
    torch.testing.assert_close(add_up(streams), expected, rtol=1e-5, atol=1e-4)
    message = (
        "input size of a row-parallel layer is 320, but 2 ranks can't split its FP8 blocks of 128: use fewer ranks"
    )
    with pytest.raises(ValueError, match=message):
        RowParallelLinear(320, 200, ranks(2)[0], quantization=FP8)
    with pytest.raises(ValueError, match="input size of o_proj is 384, but 2 ranks can't split its FP8 blocks"):
        RowParallelLinear(384, 200, ranks(2)[1], name="o_proj", own_columns=slice(256, 512), quantization=FP8)


def test_ranks_that_would_need_additional_heads_are_refused(ranks):
    message = "q_proj has 3 groups of heads, which 2 ranks can't split evenly in block FP8: use a number of ranks that"
    with pytest.raises(ValueError, match=message):
        ColumnParallelLinear(128, qkv_parts(6, 3, 128, bias=False), ranks(2)[1], quantization=FP8)


def test_gated_mlp_multiplies_quantised_weights(build):
    norm = RMSNorm(160, 1e-6, build)
    model = nn.ModuleDict({"mlp": GatedMLP(160, 200, build, quantization=FP8), "norm": norm})
    tensors = make_quantized_tensors("mlp.gate_proj", 200, 160) | make_quantized_tensors("mlp.up_proj", 200, 160)
    tensors |= make_quantized_tensors("mlp.down_proj", 160, 200) | {"norm.weight": torch.rand(160)}
    load_weights(model, tensors.items())
    x = torch.randn(4, 160)
    gate, up, down = (
        BlockFP8Weight(tensors[f"mlp.{name}_proj.weight"], tensors[f"mlp.{name}_proj.weight_scale_inv"])
        for name in ("gate", "up", "down")
    )
    normed = norm(x)
    expected = x + linear(nn.functional.silu(linear(normed, gate)) * linear(normed, up), down)
    stream = model["mlp"](x, ResidualStream(x.clone()), norm)
    torch.testing.assert_close(stream.residual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("layer.weight_scale_inv"),
            "the checkpoint lacks 1 of 2 tensors: layer.weight_scale_inv [2, 2]",
        ),
        (
            lambda t: t.update({"layer.weight": torch.randn(200, 256).bfloat16()}),
            "tensor layer.weight is of bfloat16, but the model expects float8_e4m3fn",
        ),
        (
            lambda t: t.update({"layer.weight_scale_inv": torch.ones(1, 2)}),
            "tensor layer.weight_scale_inv has shape [1, 2], but the model expects [2, 2]",
        ),
    ],
    ids=["no scale", "not quantised", "other blocks"],
)
def test_checkpoint_of_another_format_is_refused(build, change, message):
    tensors = make_quantized_tensors("layer", 200, 256)
    change(tensors)
    with pytest.raises(WeightError, match=re.escape(message)):
        load_layer(RowParallelLinear(256, 200, build, quantization=FP8), tensors)


def test_a_quantised_tensor_in_a_plain_model_is_refused(build):
    tensors = make_quantized_tensors("layer", 200, 256)
    scale = tensors.pop("layer.weight_scale_inv")
    message = "tensor layer.weight is of float8_e4m3fn, but the model expects floating-point numbers of 16 bits or more"
    with pytest.raises(WeightError, match=message):
        load_layer(RowParallelLinear(256, 200, build), tensors)
    with pytest.raises(WeightError, match=r"layer\.weight_scale_inv \[2, 2\] is in the checkpoint, but the model has"):
        load_layer(RowParallelLinear(256, 200, build), {"layer.weight_scale_inv": scale})


def test_random_weights_are_normal(build):
    layer = ColumnParallelLinear(300, (LinearPart("a", 192), LinearPart("b", 64)), build, quantization=FP8)
    fill_random(nn.ModuleList([layer]), 1)
    assert layer.weight.block_rows == 64
    assert 0.019 < dequantize(layer.weight).std() < 0.021


def test_excluded_modules_are_not_quantised():
    scheme = BlockFP8(("lm_head", "gate", "model.layers.3", "model.layers.1.self_attn.q_proj"))
    assert find_quantization(None, "model.layers.0.mlp", "up_proj") is None
    assert find_quantization(scheme, "model.layers.0.mlp", "gate_proj", "up_proj") is scheme
    assert find_quantization(scheme, "model.layers.30.mlp", "gate_proj", "up_proj") is scheme
    assert find_quantization(scheme, "model.layers.3.mlp", "gate_proj", "up_proj") is None
    assert scheme.excludes("model.layers.0.mlp.gate")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj is not quantised, but .*k_proj is"):
        find_quantization(scheme, "model.layers.1.self_attn", "q_proj", "k_proj")
