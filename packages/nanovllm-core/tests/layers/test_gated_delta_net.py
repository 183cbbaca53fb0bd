import pytest
import torch
from torch import nn

from nanovllm_core.layers.gated_attention import GatedQKVLinear
from nanovllm_core.layers.gated_delta_net import DeltaShape, GatedDeltaNet
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.weights import load_weights
from nanovllm_core.model import ForwardContext, StateCache, StateSpec
from nanovllm_kernels.attention import plan_batch
from nanovllm_kernels.linear_attention import plan_states

SHAPE = DeltaShape(num_k_heads=4, num_v_heads=8, k_dim=8, v_dim=16, num_taps=4, eps=1e-6)
HIDDEN = 24


def make_weights():
    generator = torch.Generator().manual_seed(0)
    keys, values = 4 * 8, 8 * 16
    shapes = {
        "in_proj_qkvz.weight": (2 * keys + 2 * values, HIDDEN),
        "in_proj_ba.weight": (16, HIDDEN),
        "conv1d.weight": (2 * keys + values, 1, 4),
        "A_log": (8,),
        "dt_bias": (8,),
        "norm.weight": (16,),
        "out_proj.weight": (HIDDEN, values),
    }
    return {f"layer.{name}": torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def load_layer(layer, tensors):
    load_weights(nn.ModuleDict({"layer": layer}), tensors.items())
    return layer


def run_layer(layer, norm, x):
    spec = layer.cache_spec
    cache = StateCache(torch.full((2, *spec.recurrent), torch.nan), torch.full((2, *spec.conv_inputs), torch.nan))
    seq_lens, starts = torch.tensor([len(x)], dtype=torch.int32), torch.tensor([0, len(x)], dtype=torch.int32)
    states = plan_states(
        torch.ones(1, dtype=torch.int32),
        torch.zeros((1, 1, 2), dtype=torch.int32),
        seq_lens,
        starts,
        num_decodes=0,
        max_query_len=len(x),
        num_tokens=len(x),
        backend="torch",
    )
    attention = plan_batch(
        torch.zeros((1, 1), dtype=torch.int32),
        seq_lens,
        starts,
        num_decodes=0,
        max_query_len=len(x),
        max_seq_len=len(x),
        num_heads=1,
        kv_cache=torch.zeros(1, 128, 2, 8),
        backend="torch",
    )
    ctx = ForwardContext(attention, torch.arange(len(x)), (), state_caches=(cache,), state_batch=states)
    return layer.out_proj.add_partial(layer.forward(*layer.project(x, norm), ctx))


def test_results_of_all_ranks_add_up_to_that_of_one_rank(build, ranks):
    x = torch.randn(70, HIDDEN)
    norm = load_layer(RMSNorm(HIDDEN, 1e-6, build), {"layer.weight": torch.rand(HIDDEN)})
    whole = load_layer(GatedDeltaNet(HIDDEN, SHAPE, 0, build), make_weights())
    assert whole.cache_spec == StateSpec((8, 16, 8), (4, 192))
    shares = [load_layer(GatedDeltaNet(HIDDEN, SHAPE, 0, build_of_rank), make_weights()) for build_of_rank in ranks(2)]
    assert shares[1].cache_spec == StateSpec((4, 16, 8), (4, 96))
    total = sum(run_layer(layer, norm, x) for layer in shares)
    torch.testing.assert_close(total, run_layer(whole, norm, x), atol=1e-4, rtol=1e-4)


def test_key_heads_that_ranks_cannot_split_are_refused(ranks):
    with pytest.raises(ValueError, match="linear_num_key_heads"):
        GatedDeltaNet(HIDDEN, SHAPE, 0, ranks(3)[0])


def test_missing_state_batch_is_an_error(build):
    layer = load_layer(GatedDeltaNet(HIDDEN, SHAPE, 0, build), make_weights())
    ctx = ForwardContext(None, torch.zeros(1), ())
    with pytest.raises(ValueError, match="ctx.state_batch is None"):
        layer.forward(torch.zeros(1, 2 * 4 * 8 + 2 * 8 * 16), torch.zeros(1, 16), ctx)


def test_gates_come_after_queries_keys_and_values_on_each_rank(ranks):
    x, q = torch.randn(3, HIDDEN), torch.randn(4, 2, 8, HIDDEN)
    k, v = torch.randn(2, 8, HIDDEN), torch.randn(2, 8, HIDDEN)
    bias = torch.randn(4, 2, 8)
    tensors = {"q_proj.weight": q.flatten(0, 2), "k_proj.weight": k.flatten(0, 1), "v_proj.weight": v.flatten(0, 1)}
    biases = {"q_proj.bias": bias.flatten(), "k_proj.bias": torch.zeros(16), "v_proj.bias": torch.zeros(16)}
    for rank, build in enumerate(ranks(2)):
        layer = load_layer(GatedQKVLinear(HIDDEN, 4, 2, 8, build, bias=True), tensors | biases)
        own_heads = slice(2 * rank, 2 * rank + 2)
        found = layer(x).split((16, 8, 8, 16), -1)
        queries_and_gates = torch.einsum("td,hpcd->tphc", x, q[own_heads]) + bias[own_heads].transpose(0, 1)
        expected = (
            queries_and_gates[:, 0].flatten(1),
            x @ k[rank].T,
            x @ v[rank].T,
            queries_and_gates[:, 1].flatten(1),
        )
        for part, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(part, wanted)


def test_zero_centred_norm_weight_is_not_rounded_to_16_bits(build):
    stored = torch.tensor([2**-9, 2**-12], dtype=torch.bfloat16)
    norm = load_layer(RMSNorm(2, 1e-6, build, zero_centred=True), {"layer.weight": stored})
    assert norm.weight.tolist() == [1 + 2**-9, 1 + 2**-12]
