from dataclasses import replace

import pytest
import torch
from counting import count_calls
from rank_results import add_up
from torch import Tensor, nn
from torch.nn import functional

from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.moe import (
    MLP_LINEAR_NAMES,
    ExpertNames,
    Experts,
    Router,
    Routing,
    SharedExpertNames,
    SparseMLP,
    TokenGate,
    can_fuse_shared,
)
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.weights import WeightError, fill_random, load_weights
from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight, dequantize, quantize_blocks

NUM_EXPERTS, HIDDEN, WIDTH = 4, 8, 12
ROUTING = Routing(2, "sigmoid")
NAMES = ExpertNames("w1", "w3", "w2")


def expert_tensors(prefix: str, names: ExpertNames = MLP_LINEAR_NAMES, width: int = WIDTH) -> dict[str, Tensor]:
    shapes = {names.gate: (width, HIDDEN), names.up: (width, HIDDEN), names.down: (HIDDEN, width)}
    return {
        f"{prefix}.{expert}.{name}.weight": torch.randn(shape)
        for expert in range(NUM_EXPERTS)
        for name, shape in shapes.items()
    }


def quantize_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise all tensors except the router's weight, as checkpoints do."""
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith("gate.weight"):
            stored[name] = tensor
            continue
        numbers, scales = quantize_blocks(tensor)
        stored |= {name: numbers, f"{name}_scale_inv": scales.bfloat16()}
    return stored


def compute_experts(x: Tensor, weights: Tensor, ids: Tensor, tensors: dict[str, Tensor], names: ExpertNames) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up, down = (tensors[f"experts.{expert}.{name}.weight"] for name in names)
            out[token] += weight * (down @ (functional.silu(gate @ x[token]) * (up @ x[token])))
    return out


@pytest.fixture
def routing() -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.rand(5, NUM_EXPERTS).topk(2)
    return torch.randn(5, HIDDEN), weights, ids.int()


@pytest.mark.parametrize("names", [MLP_LINEAR_NAMES, NAMES])
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_have_an_even_share_of_every_experts_width(names, size, ranks, routing):
    x, weights, ids = routing
    tensors = expert_tensors("experts", names)
    residual, streams = torch.randn(5, HIDDEN), []
    for build in ranks(size):
        experts = Experts(NUM_EXPERTS, HIDDEN, WIDTH, build, names)
        load_weights(nn.ModuleDict({"experts": experts}), reversed(tensors.items()))
        streams.append(experts.forward(x, weights, ids, ResidualStream(residual.clone())))
    torch.testing.assert_close(
        add_up(streams), compute_experts(x, weights, ids, tensors, names) + residual, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("quantization", [None, BlockFP8()])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_has_some_experts_as_wholes(num_ranks, quantization, ranks, routing):
    x, weights, ids = routing
    tensors = expert_tensors("experts", width=256)
    if quantization is not None:
        tensors = quantize_tensors(tensors)
    residual, streams = torch.randn(5, HIDDEN), []
    (single,) = ranks(1)
    whole = Experts(NUM_EXPERTS, HIDDEN, 256, single, quantization=quantization)
    load_weights(nn.ModuleDict({"experts": whole}), tensors.items())
    for build in ranks(num_ranks):
        build = replace(build, parallel=replace(build.parallel, has_whole_experts=True))
        experts = Experts(NUM_EXPERTS, HIDDEN, 256, build, quantization=quantization)
        load_weights(nn.ModuleDict({"experts": experts}), tensors.items())
        assert experts.weights.w2.shape == (NUM_EXPERTS // num_ranks, HIDDEN, 256)
        streams.append(experts.forward(x, weights, ids, ResidualStream(residual.clone())))
    expected = whole.forward(x, weights, ids, ResidualStream(residual.clone())).residual
    torch.testing.assert_close(add_up(streams), expected, rtol=1e-4, atol=1e-3)


def test_widths_that_ranks_cannot_share_are_refused(ranks):
    with pytest.raises(ValueError, match=r"the width of an expert \(.*\) is 10"):
        Experts(NUM_EXPERTS, HIDDEN, 10, ranks(3)[0])
    with pytest.raises(ValueError, match="is 192, but 2 ranks can't split its FP8 blocks of 128"):
        Experts(NUM_EXPERTS, HIDDEN, 192, ranks(2)[0], quantization=BlockFP8())
    build = ranks(3)[0]
    build = replace(build, parallel=replace(build.parallel, has_whole_experts=True))
    with pytest.raises(ValueError, match="the number of experts is 4, which 3 ranks can't split evenly"):
        Experts(4, HIDDEN, WIDTH, build)


@pytest.mark.parametrize(("size", "width"), [(1, 150), (2, 256)])
def test_quantised_experts_keep_the_scales_of_each_tensor(size, width, ranks, routing):
    x, weights, ids = routing
    stored = quantize_tensors(expert_tensors("experts", width=width))
    plain = {
        name: dequantize(BlockFP8Weight(tensor, stored[f"{name}_scale_inv"].float()))
        for name, tensor in stored.items()
        if name.endswith(".weight")
    }
    streams = []
    for build in ranks(size):
        experts = Experts(NUM_EXPERTS, HIDDEN, width, build, quantization=BlockFP8())
        load_weights(nn.ModuleDict({"experts": experts}), stored.items())
        assert experts.weights.w13.dtype == torch.float8_e4m3fn
        streams.append(experts.forward(x, weights, ids, ResidualStream(torch.zeros(5, HIDDEN))))
    expected = compute_experts(x, weights, ids, plain, MLP_LINEAR_NAMES)
    # The layer rounds its inputs to e4m3 too.
    assert (add_up(streams) - expected).norm() < 0.08 * expected.norm()
    del stored["experts.2.up_proj.weight_scale_inv"]
    with pytest.raises(WeightError, match=r"lacks 1 of 24 .*: experts\.2\.up_proj\.weight_scale_inv \[2, 1\]"):
        load_weights(nn.ModuleDict({"experts": experts}), stored.items())


@pytest.mark.parametrize(
    ("bias", "name"),
    [("gate.e_score_correction_bias", "mlp.gate.e_score_correction_bias"), ("bias", "mlp.bias"), (None, None)],
)
def test_a_router_and_its_experts_are_one_feed_forward_layer(bias, name, build):
    router = Router(HIDDEN, NUM_EXPERTS, ROUTING, build, bias_name=bias)
    mlp = SparseMLP(router, Experts(NUM_EXPERTS, HIDDEN, WIDTH, build))
    tensors = expert_tensors("mlp.experts") | {"mlp.gate.weight": torch.randn(NUM_EXPERTS, HIDDEN)}
    if name is not None:
        tensors[name] = torch.randn(NUM_EXPERTS) * 2
    load_weights(nn.ModuleDict({"mlp": mlp}), tensors.items())
    norm = RMSNorm(HIDDEN, 1e-6, build)
    fill_random(norm, 0)
    x, residual = torch.randn(6, HIDDEN), torch.randn(6, HIDDEN)
    scores = (x @ tensors["mlp.gate.weight"].T).sigmoid()
    ids = (scores + (0 if name is None else tensors[name])).topk(2).indices
    weights = scores.gather(1, ids)
    weights /= weights.sum(-1, keepdim=True)
    unprefixed_tensors = {key.removeprefix("mlp."): tensor for key, tensor in tensors.items()}
    expected = compute_experts(x, weights, ids, unprefixed_tensors, MLP_LINEAR_NAMES)

    def forward(*arguments):
        return mlp.forward(arguments[0], ResidualStream(residual.clone()), *arguments[1:]).residual

    torch.testing.assert_close(forward(x), expected + residual, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(forward(x, norm), forward(norm.forward(x)))


@pytest.mark.parametrize("quantization", [None, BlockFP8()])
@pytest.mark.parametrize("gate", [None, "shared_expert_gate"])
@pytest.mark.parametrize("size", [1, 2])
def test_shared_expert_is_computed_as_one_more_expert(size, gate, quantization, ranks):
    width, shared = (256, SharedExpertNames("shared_expert", gate))
    tensors = expert_tensors("mlp.experts", width=width) | {"mlp.gate.weight": torch.randn(NUM_EXPERTS, HIDDEN)}
    shared_tensors = {
        name.replace("experts.0", "shared_expert"): 2 * tensors[name] for name in tensors if "experts.0" in name
    }
    if quantization is not None:
        tensors, shared_tensors = (quantize_tensors(plain) for plain in (tensors, shared_tensors))
    gates = {} if gate is None else {f"mlp.{gate}.weight": torch.randn(1, HIDDEN)}
    x, residual = torch.randn(6, HIDDEN), torch.randn(6, HIDDEN)
    fused_streams, routed_streams, shared_results = [], [], []
    for build in ranks(size):
        sizes = (NUM_EXPERTS, HIDDEN, width, build)
        router = Router(HIDDEN, NUM_EXPERTS, ROUTING, build, shared=shared)
        mlp = SparseMLP(router, Experts(*sizes, shared=shared, quantization=quantization))
        load_weights(nn.ModuleDict({"mlp": mlp}), (tensors | shared_tensors | gates).items())
        fused_streams.append(mlp.forward(x, ResidualStream(residual.clone())))
        assert router.forward(x)[1][:, -1].tolist() == [NUM_EXPERTS] * 6

        routed = SparseMLP(Router(HIDDEN, NUM_EXPERTS, ROUTING, build), Experts(*sizes, quantization=quantization))
        load_weights(nn.ModuleDict({"mlp": routed}), tensors.items())
        separate = nn.ModuleDict({"shared_expert": GatedMLP(HIDDEN, width, build, quantization=quantization)})
        load_weights(nn.ModuleDict({"mlp": separate}), shared_tensors.items())
        weight = torch.ones(6, 1)
        if gate is not None:
            token_gate = TokenGate(HIDDEN, build)
            load_weights(nn.ModuleDict({"mlp": nn.ModuleDict({gate: token_gate})}), gates.items())
            weight = token_gate.forward(x)
        routed_streams.append(routed.forward(x, ResidualStream(residual.clone())))
        shared_results.append(weight * separate["shared_expert"].compute_partial(x))
    torch.testing.assert_close(
        add_up(fused_streams), add_up(routed_streams) + sum(shared_results), rtol=1e-4, atol=1e-3
    )
    del shared_tensors[next(iter(shared_tensors))]
    with pytest.raises(WeightError, match=r"lacks 1 of \d+ tensors: mlp\.shared_expert\.gate_proj\.weight \[256, 8\]"):
        load_weights(nn.ModuleDict({"mlp": mlp}), (tensors | shared_tensors | gates).items())


def test_shared_expert_is_fused_only_if_narrow_and_of_the_same_width_and_format(build, ranks):
    assert can_fuse_shared(512, 512, build, same_format=True)
    assert not can_fuse_shared(512, 512, build, same_format=False)
    assert not can_fuse_shared(512, 1024, build, same_format=True)
    assert not can_fuse_shared(2048, 2048, build, same_format=True)
    first, _ = ranks(2)
    assert can_fuse_shared(2048, 2048, first, same_format=True)


def test_a_router_decides_in_float32_on_a_cpu(build):
    router = Router(HIDDEN, NUM_EXPERTS, ROUTING, replace(build, dtype=torch.bfloat16), bias_name="bias")
    load_weights(
        nn.ModuleDict({"gate": router}),
        {"gate.weight": torch.full((NUM_EXPERTS, HIDDEN), 1.001), "bias": torch.tensor([0.0, 1e-6, 0, 0])}.items(),
    )
    weights, ids = router.forward(torch.ones(1, HIDDEN, dtype=torch.bfloat16) / 64)
    assert router.weight.dtype == torch.float32
    assert weights.dtype == torch.float32
    assert ids[0, 0] == 1


def test_random_experts_depend_on_the_seed(build):
    def make_experts(seed: int, quantization: BlockFP8 | None = None) -> Experts:
        experts = Experts(1, 64, 64, build, shared=SharedExpertNames("shared"), quantization=quantization)
        fill_random(nn.ModuleList([experts]), seed)
        return experts

    assert torch.equal(make_experts(1).weights.w13, make_experts(1).weights.w13)
    assert not torch.equal(make_experts(1).weights.w2, make_experts(2).weights.w2)
    w13, w2, scales13, scales2, *_ = make_experts(1, BlockFP8()).weights
    assert 0.015 < (w13.float() * scales13.flatten(0, 1).view(2, 2, 1).repeat_interleave(64, 1)).std() < 0.025
    assert 0.015 < (w2.float() * scales2).std() < 0.025


def test_work_to_load_experts_grows_linearly_with_their_number(build):
    def count_load_calls(num_layers: int, num_experts: int) -> int:
        layers = nn.ModuleList(Experts(num_experts, 2, 2, build, quantization=BlockFP8()) for _ in range(num_layers))
        names = [name for index, layer in enumerate(layers) for name, _ in layer.weight_slots(str(index))]
        assert len(names) == num_layers * num_experts * 6
        numbers, scales = torch.zeros(2, 2, dtype=torch.float8_e4m3fn), torch.zeros(1, 1)
        tensors = [(name, scales if name.endswith("inv") else numbers) for name in names]
        return count_calls(load_weights, layers, tensors).total()

    num_calls = count_load_calls(2, 32)
    assert count_load_calls(4, 32) < 2.2 * num_calls
    assert count_load_calls(2, 64) < 2.2 * num_calls
