"""Layers split over ranks: the combined result equals that of one rank."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nanovllm_core.layers.embedding import LMHead, VocabEmbedding
from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
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
    total = torch.zeros(3, 5)
    for build, share in zip(ranks(NUM_RANKS), x.chunk(NUM_RANKS, dim=1), strict=True):
        layer = RowParallelLinear(8, 5, build, bias=True)
        total += load_layer(layer, **{"layer.weight": weight, "layer.bias": bias})(share.contiguous())
    torch.testing.assert_close(total, x @ weight.T + bias)


def test_result_has_the_dtype_of_a_float32_residual_on_all_ranks(ranks, x):
    weight, residual = torch.randn(5, 8).bfloat16(), torch.randn(3, 5)
    total = torch.zeros(3, 5)
    for build, share in zip(ranks(NUM_RANKS), x.bfloat16().chunk(NUM_RANKS, dim=1), strict=True):
        layer = load_layer(RowParallelLinear(8, 5, replace(build, dtype=torch.bfloat16)), **{"layer.weight": weight})
        part = layer(share.contiguous(), residual.clone())
        assert part.dtype == torch.float32
        total += part
    torch.testing.assert_close(total, x @ weight.float().T + residual, rtol=2**-6, atol=0.05)


def test_the_residual_stream_of_bf16_weights_is_float32_on_a_cpu(ranks):
    weight, ids = torch.randn(10, 8).bfloat16(), torch.tensor([0, 9], dtype=torch.int32)
    for size in (1, NUM_RANKS):
        builds = [replace(build, dtype=torch.bfloat16) for build in ranks(size)]
        parts = [load_layer(VocabEmbedding(10, 8, build), **{"layer.weight": weight})(ids) for build in builds]
        assert torch.equal(sum(parts), weight[ids.long()].float())
        assert {part.dtype for part in parts} == {torch.float32}


def test_each_token_is_embedded_by_the_rank_that_has_it(ranks):
    weight, ids = torch.randn(10, 8), torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    parts = [load_layer(VocabEmbedding(10, 8, build), **{"layer.weight": weight})(ids) for build in ranks(NUM_RANKS)]
    assert torch.equal(sum(parts), weight[ids.long()])


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_all_ranks_concatenated_are_the_logits(ranks, x, tied):
    weight = torch.randn(10, 8)
    logits = []
    for build in ranks(NUM_RANKS):
        embedding = load_layer(VocabEmbedding(10, 8, build), **{"layer.weight": weight}) if tied else None
        head = LMHead(10, 8, build, embedding)
        logits.append(load_layer(head, **({} if tied else {"layer.weight": weight}))(x))
    torch.testing.assert_close(torch.cat(logits, dim=1), x @ weight.T)


def test_a_tied_head_shares_the_table_of_its_embedding(build):
    embedding = VocabEmbedding(10, 8, build)
    head = LMHead(10, 8, build, embedding)
    load_weights(nn.ModuleDict({"embedding": embedding, "head": head}), {"embedding.weight": torch.ones(10, 8)}.items())
    assert head.weight.data.data_ptr() == embedding.weight.data_ptr()


def test_uneven_split_over_ranks_is_refused(ranks):
    build = ranks(3)[0]
    with pytest.raises(ValueError, match="gate_proj"):
        ColumnParallelLinear(8, (LinearPart("gate_proj", 10),), build)
    with pytest.raises(ValueError, match="vocab_size"):
        VocabEmbedding(10, 8, build)
