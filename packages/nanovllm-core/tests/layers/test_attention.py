import pytest
import torch

from nanovllm_core.layers.attention import HeadLayout, attend, qkv_parts
from nanovllm_core.layers.rotary import RotaryConfig, RotaryEmbedding, rotary_table
from nanovllm_core.model import ForwardContext, PagedSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import plan_batch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, LENGTH = 4, 2, 8, 16, 20


def attend_naively(qkv: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        cos, sin = cos_sin[: len(x), None].chunk(2, dim=-1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    q, k, v = qkv.view(LENGTH, -1, HEAD_DIM).split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    q, k, v = (x.transpose(0, 1) for x in (rotate(q), rotate(k), v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_request_in_two_steps_attends_as_if_whole(is_captured):
    torch.manual_seed(0)
    heads = HeadLayout.for_rank(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, ParallelContext())
    assert heads.cache_spec == PagedSpec(NUM_KV_HEADS, HEAD_DIM, NUM_HEADS)
    width = sum(part.out_features for part in qkv_parts(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, bias=False))
    qkv = torch.randn(LENGTH, width)
    cos_sin = rotary_table(RotaryConfig(10000.0), HEAD_DIM, 32, torch.device("cpu"))
    rotary = RotaryEmbedding(RotaryConfig(10000.0), HEAD_DIM, 32, torch.device("cpu"))
    other_cache, cache = (torch.full((4, BLOCK_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM), torch.nan) for _ in range(2))
    blocks = torch.tensor([3, 1])
    outputs = []
    for begin, end in ((0, LENGTH - 1), (LENGTH - 1, LENGTH)):
        positions = torch.arange(begin, end)
        attention = plan_batch(
            blocks.int().unsqueeze(0),
            torch.tensor([end], dtype=torch.int32),
            torch.tensor([0, end - begin], dtype=torch.int32),
            num_decodes=int(end - begin == 1),
            max_query_len=end - begin,
            max_seq_len=end,
            num_heads=NUM_HEADS,
            kv_cache=cache,
            backend="torch",
        )
        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        launch = (lambda attend, q, batch=attention: attend(q, batch)) if is_captured else None
        ctx = ForwardContext(None if is_captured else attention, slots, (other_cache, cache), launch_attention=launch)
        outputs.append(attend(heads.view_heads(qkv[begin:end].clone()), rotary.plan(positions), ctx, cache_index=1))
    torch.testing.assert_close(torch.cat(outputs), attend_naively(qkv, cos_sin))
    assert other_cache.isnan().all()
    assert not cache[3].isnan().any()
