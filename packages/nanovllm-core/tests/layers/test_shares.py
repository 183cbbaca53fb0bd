"""Layers split over ranks: the combined result equals that of one rank."""

from dataclasses import replace

import pytest
import torch
from rank_results import add_up
from torch import nn

from nanovllm_core.layers.attention import HeadLayout, qkv_parts
from nanovllm_core.layers.embedding import LMHead, VocabEmbedding
from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.weights import load_weights

NUM_RANKS = 2


def load_layer(layer, **tensors):
    load_weights(nn.ModuleDict({"layer": layer}), tensors.items())
    return layer


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8)


def test_column_parallel_ranks_have_an_even_share_of_every_part(ranks, x):
    q, k, bias = torch.randn(12, 8), torch.randn(4, 8), torch.randn(4)
    outputs = []
    for build in ranks(NUM_RANKS):
        layer = ColumnParallelLinear(8, (LinearPart("q", 12), LinearPart("k", 4, bias=True)), build)
        outputs.append(load_layer(layer, **{"q.weight": q, "k.weight": k, "k.bias": bias})(x))
    torch.testing.assert_close(torch.cat([out[:, :6] for out in outputs], dim=1), x @ q.T)
    torch.testing.assert_close(torch.cat([out[:, 6:] for out in outputs], dim=1), x @ k.T + bias)


def test_row_parallel_ranks_add_up_with_the_bias_once(ranks, x):
    weight, bias = torch.randn(5, 8), torch.randn(5)
    streams = []
    for build, share in zip(ranks(NUM_RANKS), x.chunk(NUM_RANKS, dim=1), strict=True):
        layer = RowParallelLinear(8, 5, build, bias=True)
        load_layer(layer, **{"layer.weight": weight, "layer.bias": bias})
        streams.append(layer(share.contiguous(), ResidualStream(torch.zeros(3, 5))))
    torch.testing.assert_close(add_up(streams), x @ weight.T + bias)


def test_two_results_between_norms_are_exchanged_together(ranks, x):
    weights, residual = (torch.randn(5, 8), torch.randn(5, 8)), torch.randn(3, 5)
    streams = []
    for build, share in zip(ranks(NUM_RANKS), x.chunk(NUM_RANKS, dim=1), strict=True):
        stream = ResidualStream(residual)
        for weight in weights:
            layer = load_layer(RowParallelLinear(8, 5, build), **{"layer.weight": weight})
            stream = layer(share.contiguous(), stream)
        assert stream.residual is residual
        streams.append(stream)
    torch.testing.assert_close(add_up(streams), residual + x @ weights[0].T + x @ weights[1].T)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_ranks_share_a_key_value_head_if_there_are_fewer_heads(ranks, x, num_kv_heads):
    num_ranks, head_dim = 4, 3
    layouts = [HeadLayout.for_rank(4, num_kv_heads, head_dim, build.parallel) for build in ranks(num_ranks)]
    assert {(layout.num_heads, layout.num_kv_heads) for layout in layouts} == {(1, 1)}
    tensors = {f"{name}_proj.weight": torch.randn(num_kv_heads * head_dim, 8) for name in "kv"}
    tensors["q_proj.weight"] = torch.randn(4 * head_dim, 8)
    expected = {name: (x @ tensor.T).unflatten(1, (-1, head_dim)) for name, tensor in tensors.items()}
    for rank, build in enumerate(ranks(num_ranks)):
        layer = ColumnParallelLinear(8, qkv_parts(4, num_kv_heads, head_dim, bias=False), build)
        query, key, value = load_layer(layer, **tensors)(x).unflatten(1, (3, head_dim)).unbind(1)
        kv_head = rank * num_kv_heads // num_ranks
        torch.testing.assert_close(query, expected["q_proj.weight"][:, rank])
        torch.testing.assert_close(key, expected["k_proj.weight"][:, kv_head])
        torch.testing.assert_close(value, expected["v_proj.weight"][:, kv_head])
    with pytest.raises(
        ValueError,
        match="num_key_value_heads is 2, which 3 ranks can't share evenly: use at most 2 ranks, or a multiple of 2$",
    ):
        HeadLayout.for_rank(6, 2, head_dim, ranks(3)[0].parallel)


def test_the_residual_stream_of_bf16_weights_is_float32_on_a_cpu(ranks):
    weight, ids = torch.randn(10, 8).bfloat16(), torch.tensor([0, 9], dtype=torch.int32)
    for size in (1, NUM_RANKS):
        builds = [replace(build, dtype=torch.bfloat16) for build in ranks(size)]
        parts = [load_layer(VocabEmbedding(10, 8, build), **{"layer.weight": weight})(ids) for build in builds]
        assert torch.equal(sum(parts), weight[ids.long()].float())
        assert {part.dtype for part in parts} == {torch.float32}


@pytest.mark.parametrize("vocab_size", [10, 11])
def test_each_token_is_embedded_by_the_rank_that_has_it(ranks, vocab_size):
    weight, ids = torch.randn(vocab_size, 8), torch.tensor([0, 4, 5, vocab_size - 1], dtype=torch.int32)
    embeddings = [VocabEmbedding(vocab_size, 8, build) for build in ranks(NUM_RANKS)]
    parts = [load_layer(embedding, **{"layer.weight": weight})(ids) for embedding in embeddings]
    assert torch.equal(sum(parts), weight[ids.long()])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab_size", [10, 11])
def test_concatenated_logits_of_all_ranks_begin_with_the_logits_of_the_vocabulary(ranks, x, tied, vocab_size):
    weight = torch.randn(vocab_size, 8)
    logits = []
    for build in ranks(NUM_RANKS):
        embedding = load_layer(VocabEmbedding(vocab_size, 8, build), **{"layer.weight": weight}) if tied else None
        head = LMHead(vocab_size, 8, build, embedding)
        logits.append(load_layer(head, **({} if tied else {"layer.weight": weight}))(x))
    assert len({part.shape for part in logits}) == 1
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, :vocab_size], x @ weight.T)


def test_a_tied_head_shares_the_table_of_its_embedding(build):
    embedding = VocabEmbedding(10, 8, build)
    head = LMHead(10, 8, build, embedding)
    load_weights(nn.ModuleDict({"embedding": embedding, "head": head}), {"embedding.weight": torch.ones(10, 8)}.items())
    assert head.weight.data.data_ptr() == embedding.weight.data_ptr()


def test_uneven_split_over_ranks_is_refused(ranks):
    build = ranks(3)[0]
    with pytest.raises(ValueError, match="gate_proj"):
        ColumnParallelLinear(8, (LinearPart("gate_proj", 10),), build)
    with pytest.raises(
        ValueError,
        match="intermediate_size is 10, which 3 ranks can't split evenly: use a number of ranks that divides 10$",
    ):
        GatedMLP(8, 10, build)
    with pytest.raises(ValueError, match="num_attention_heads is 4, which 3 ranks can't split evenly"):
        HeadLayout.for_rank(4, 1, 8, build.parallel)


def test_uneven_heads_are_filled_up_with_heads_of_zeros(ranks, x):
    head_dim, group_size, num_kv_heads = 2, 3, 3
    num_heads = group_size * num_kv_heads
    sizes = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    tensors = {f"{name}_proj.weight": torch.randn(size * head_dim, 8) for name, size in sizes.items()}
    parts = qkv_parts(num_heads, num_kv_heads, head_dim, bias=False)
    weight, residual, streams, queries = torch.randn(5, num_heads * head_dim), torch.randn(3, 5), [], []
    for build in ranks(NUM_RANKS):
        layout = HeadLayout.for_rank(num_heads, num_kv_heads, head_dim, build.parallel)
        assert (layout.num_heads, layout.num_kv_heads) == (6, 2)
        projected = load_layer(ColumnParallelLinear(8, parts, build), **tensors)(x)
        q, k, v = layout.view_heads(projected).split((6, 2, 2), 1)
        if build.parallel.rank == 1:
            assert not q[:, 3:].any()
            assert not k[:, 1:].any()
            assert not v[:, 1:].any()
        queries.append(q.flatten(1))
        layer = RowParallelLinear(num_heads * head_dim, 5, build, own_columns=parts[0].own_rows(build.parallel))
        load_layer(layer, **{"layer.weight": weight})
        streams.append(layer(queries[-1], ResidualStream(residual)))
    expected = x @ tensors["q_proj.weight"].T
    torch.testing.assert_close(torch.cat(queries, 1)[:, : num_heads * head_dim], expected)
    torch.testing.assert_close(add_up(streams), residual + expected @ weight.T, rtol=1e-4, atol=1e-4)
