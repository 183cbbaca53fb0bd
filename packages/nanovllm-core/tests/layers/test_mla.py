from dataclasses import replace

import pytest
import torch

from nanovllm_core.layers.mla import LatentAttention, LatentAttentionConfig
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.rotary import RotaryConfig, RotaryEmbedding
from nanovllm_core.layers.weights import load_weights
from nanovllm_core.model import BuildContext, ForwardContext, MLASpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention.mla import plan_latent_batch

HIDDEN, LENGTH, BLOCK_SIZE = 16, 20, 16
SHAPE = LatentAttentionConfig(
    num_heads=3, key_dim=6, rope_dim=4, value_dim=5, query_rank=8, latent_dim=10, scale=0.3, interleaved=True, bias=True
)
BUILD = BuildContext(torch.device("cpu"), torch.float32, ParallelContext())


def make_weights(shape):
    heads, head_dim = shape.num_heads, shape.key_dim + shape.rope_dim
    latent = shape.latent_dim + shape.rope_dim
    sizes = {
        "kv_a_proj_with_mqa.weight": (latent, HIDDEN),
        "kv_a_proj_with_mqa.bias": (latent,),
        "kv_a_layernorm.weight": (shape.latent_dim,),
        "kv_b_proj.weight": (heads * (shape.key_dim + shape.value_dim), shape.latent_dim),
        "o_proj.weight": (HIDDEN, heads * shape.value_dim),
        "o_proj.bias": (HIDDEN,),
    }
    if shape.query_rank is None:
        sizes["q_proj.weight"] = (heads * head_dim, HIDDEN)
    else:
        sizes |= {"q_a_proj.weight": (shape.query_rank, HIDDEN), "q_a_proj.bias": (shape.query_rank,)}
        sizes |= {"q_a_layernorm.weight": (shape.query_rank,), "q_b_proj.weight": (heads * head_dim, shape.query_rank)}
    return {name: torch.randn(size) for name, size in sizes.items()}


def attend_naively(x, shape, weights):
    """The equations of https://arxiv.org/abs/2405.04434 for each head, in float64."""
    w = {name.removesuffix(".weight"): tensor.double() for name, tensor in weights.items()}
    x = x.double()

    def norm(rows, name):
        return rows / (rows.square().mean(-1, keepdim=True) + shape.eps).sqrt() * w[name]

    def rotate(rows):
        pairs = rows.view(*rows.shape[:-1], -1, 2)
        if not shape.interleaved:
            pairs = rows.view(*rows.shape[:-1], 2, -1).transpose(-1, -2)
        angles = torch.arange(LENGTH)[:, None] * 100.0 ** (-torch.arange(0, shape.rope_dim, 2) / shape.rope_dim)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

    if shape.query_rank is None:
        q = x @ w["q_proj"].T
    else:
        q = norm(x @ w["q_a_proj"].T + w["q_a_proj.bias"], "q_a_layernorm") @ w["q_b_proj"].T
    row = x @ w["kv_a_proj_with_mqa"].T + w["kv_a_proj_with_mqa.bias"]
    latent = norm(row[:, : shape.latent_dim], "kv_a_layernorm")
    k_rope = rotate(row[:, shape.latent_dim :])
    outs = []
    for head_q, rows in zip(q.chunk(shape.num_heads, 1), w["kv_b_proj"].chunk(shape.num_heads), strict=True):
        k, v = (latent @ rows.T).split((shape.key_dim, shape.value_dim), 1)
        q_rope = rotate(head_q[:, shape.key_dim :])
        scores = (head_q[:, : shape.key_dim] @ k.T + q_rope @ k_rope.T) * shape.scale
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        outs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("changes", [{}, {"query_rank": None}, {"interleaved": False}])
def test_a_request_in_two_steps_attends_as_the_paper_says(changes, is_captured):
    torch.manual_seed(0)
    shape = replace(SHAPE, **changes)
    layer = LatentAttention(HIDDEN, shape, 1, BUILD)
    assert layer.cache_spec == MLASpec(10, 4, 3)
    weights = make_weights(shape)
    load_weights(layer, [(f"{name}", tensor) for name, tensor in weights.items()])
    norm = RMSNorm(HIDDEN, 1e-6, BUILD)
    load_weights(norm, [(".weight", torch.ones(HIDDEN))])
    x = torch.randn(LENGTH, HIDDEN)
    rotary = RotaryEmbedding(RotaryConfig(100.0), shape.rope_dim, 32, torch.device("cpu"))
    other_cache, cache = (torch.full((4, BLOCK_SIZE, 1, 14), torch.nan) for _ in range(2))
    blocks = torch.tensor([3, 1])
    outputs = []
    for begin, end in ((0, LENGTH - 4), (LENGTH - 4, LENGTH - 1), (LENGTH - 1, LENGTH)):
        positions = torch.arange(begin, end)
        attention = plan_latent_batch(
            blocks.int().unsqueeze(0),
            torch.tensor([end], dtype=torch.int32),
            torch.tensor([0, end - begin], dtype=torch.int32),
            num_decodes=int(end - begin == 1),
            max_query_len=end - begin,
            max_seq_len=end,
            num_heads=3,
            kv_cache=cache,
            backend="torch",
        )

        def launch(attend, q, value_dim=None, batch=attention):
            out = attend(q, batch)
            assert out.shape == (*q.shape[:-1], value_dim)
            return out

        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        ctx = ForwardContext(
            None if is_captured else attention,
            slots,
            (other_cache, cache),
            launch_attention=launch if is_captured else None,
        )
        outputs.append(layer.forward(*layer.project(x[begin:end], norm), rotary.plan(positions), ctx))
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(
        torch.cat(outputs).double(), attend_naively(normed, shape, weights), atol=1e-5, rtol=1e-5
    )
    assert other_cache.isnan().all()
    assert not cache[3].isnan().any()
