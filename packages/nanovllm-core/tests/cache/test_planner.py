"""The number of blocks and slots for a given memory size."""

from dataclasses import replace

import pytest
import torch

from nanovllm_core.cache.planner import MAX_CACHED_BLOCKS, bytes_per_block, choose_block_size, plan_cache
from nanovllm_core.config import ConfigError, EngineConfig, resolve
from nanovllm_core.model import MLASpec, PagedSpec

FACTS = {"max_position": 4096, "model_dtype": torch.bfloat16, "has_cuda": True, "has_fp8": True}


@pytest.mark.parametrize(("head_dim", "gain"), [(64, 1.96), (128, 1.98)])
def test_fp8_holds_about_twice_as_many_blocks(head_dim, gain):
    specs = [PagedSpec(num_kv_heads=8, head_dim=head_dim, num_heads=32)] * 28
    blocks = {}
    for kind in ("auto", "fp8"):
        config = resolve(EngineConfig(kv_cache_dtype=kind, max_num_seqs=4096), **FACTS)
        block_bytes = bytes_per_block(specs, 16, config.kv_cache_dtype)
        blocks[kind] = plan_cache(config, 16, 8 << 30, block_bytes).num_blocks
    assert blocks["auto"] > 1000
    assert blocks["fp8"] / blocks["auto"] > gain


def test_a_token_of_latent_attention_is_one_row_a_layer():
    specs = [MLASpec(latent_dim=512, rope_dim=64, num_heads=128)] * 61
    assert bytes_per_block(specs, 1, torch.bfloat16) == 61 * 576 * 2
    assert bytes_per_block(specs, 16, torch.float8_e4m3fn) == 61 * (576 + 1) * 16


def test_fp8_is_refused_where_it_cannot_be_read():
    with pytest.raises(ConfigError, match="kv_cache_dtype is int4, but must be 'auto' or 'fp8'"):
        resolve(EngineConfig(kv_cache_dtype="int4"), **FACTS)
    with pytest.raises(ConfigError, match="kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9"):
        resolve(EngineConfig(kv_cache_dtype="fp8"), **{**FACTS, "has_fp8": False})
    flash = EngineConfig(kv_cache_dtype="fp8", attention_backend="flash")
    with pytest.raises(ConfigError, match="attention_backend 'flash': use 'fastest'"):
        resolve(flash, has_flash_attention=True, **FACTS)
    resolve(replace(flash, kv_cache_dtype="auto"), has_flash_attention=True, **FACTS)
    assert resolve(EngineConfig(kv_cache_dtype="fp8", device="cpu"), **FACTS).kv_cache_dtype == torch.float8_e4m3fn


def test_a_model_may_prefer_a_dtype_on_a_gpu():
    def dtype(config: EngineConfig) -> torch.dtype:
        return resolve(config, cuda_dtype=torch.float16, **FACTS).dtype

    assert dtype(EngineConfig()) == torch.float16
    assert dtype(EngineConfig(device="cpu")) == torch.bfloat16
    assert dtype(EngineConfig(dtype=torch.float32)) == torch.float32


def num_blocks(free_bytes: int, **settings) -> int:
    config = resolve(EngineConfig(max_num_seqs=4, max_model_len=160, **settings), **FACTS)
    return plan_cache(config, 16, free_bytes, block_bytes=1000).num_blocks


def test_a_prefix_cache_takes_all_free_memory():
    assert num_blocks(1_000_000) == 999
    assert num_blocks(1_000_000, device="cpu") == 999
    assert num_blocks(30_000) == 29
    assert num_blocks(1 << 50) == MAX_CACHED_BLOCKS


def test_without_a_prefix_cache_blocks_are_for_running_requests():
    assert num_blocks(1_000_000, prefix_caching=False) == 4 * 10
    assert num_blocks(30_000, prefix_caching=False) == 29


PAGED = PagedSpec(num_kv_heads=8, head_dim=128, num_heads=32)


def block_size(attention=PAGED, *, has_states=False, **settings) -> int:
    config = resolve(EngineConfig(**settings), has_flash_attention=True, **FACTS)
    return choose_block_size(config, attention, has_states=has_states)


@pytest.fixture
def flash_attention(monkeypatch):
    monkeypatch.setattr("nanovllm_kernels.attention.gqa.has_flash_attention", lambda: True)


@pytest.mark.usefixtures("flash_attention")
def test_blocks_are_as_long_as_flash_attention_reads_fastest():
    assert block_size() == 128
    assert block_size(block_size=32) == 32


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    "others",
    [
        {"attention_backend": "triton"},
        {"kv_cache_dtype": "fp8"},
        {"attention": PAGED._replace(head_dim=256)},
        {"attention": MLASpec(latent_dim=512, rope_dim=64, num_heads=128)},
        {"has_states": True},
        {"max_num_seqs": 100, "max_num_batched_tokens": 200},
        {"device": "cpu"},
    ],
)
def test_blocks_are_short_where_long_ones_bring_nothing_or_do_not_fit(others):
    assert block_size(**others) == 16


def test_blocks_longer_than_the_distance_of_checkpoints_are_refused():
    with pytest.raises(ConfigError, match="block_size is 128, but must be at most 64 for a model with recurrent"):
        block_size(block_size=128, has_states=True)
