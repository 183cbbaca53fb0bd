import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm_core.cache.memory import (
    MAX_CACHED_BLOCKS,
    CacheLayout,
    CacheMemory,
    allocate_zeros,
    choose_block_size,
    order_slot_copies,
    plan_cache,
)
from nanovllm_core.cache.state_pool import NULL_SLOT
from nanovllm_core.config import EngineConfig
from nanovllm_core.config_resolution import resolve
from nanovllm_core.errors import ConfigError
from nanovllm_core.model import CacheSpec, MLASpec, PagedSpec, StateSpec

CPU = torch.device("cpu")

MODEL_AND_MACHINE = {"max_position": 4096, "model_dtype": torch.bfloat16, "has_cuda": True, "has_fp8": True}


def make_layout(
    *specs: CacheSpec, block_size: int = 16, kv_cache_dtype=torch.bfloat16, state_dtype=torch.float32
) -> CacheLayout:
    attention_specs = tuple(spec for spec in specs if not isinstance(spec, StateSpec))
    state_specs = tuple(spec for spec in specs if isinstance(spec, StateSpec))
    return CacheLayout(attention_specs, state_specs, block_size, kv_cache_dtype, state_dtype, torch.bfloat16)


@pytest.mark.parametrize(("head_dim", "gain"), [(64, 1.96), (128, 1.98)])
def test_fp8_holds_about_twice_as_many_blocks(head_dim, gain):
    specs = [PagedSpec(num_kv_heads=8, head_dim=head_dim, num_heads=32)] * 28
    num_blocks = {}
    for kind in ("auto", "fp8"):
        config = resolve(EngineConfig(kv_cache_dtype=kind, max_num_seqs=4096), **MODEL_AND_MACHINE)
        layout = make_layout(*specs, kv_cache_dtype=config.torch_kv_cache_dtype)
        num_blocks[kind] = plan_cache(config, layout, 8 << 30).num_blocks
    assert num_blocks["auto"] > 1000
    assert num_blocks["fp8"] / num_blocks["auto"] > gain


def test_a_token_of_latent_attention_has_one_head_per_layer():
    specs = [MLASpec(latent_dim=512, rope_dim=64, num_heads=128)] * 61
    assert make_layout(*specs, block_size=1).block_bytes == 61 * 576 * 2
    assert make_layout(*specs, kv_cache_dtype=torch.float8_e4m3fn).block_bytes == 61 * (576 + 1) * 16


def test_cache_dtype_is_refused_if_it_is_unknown_or_the_backend_cannot_read_it():
    with pytest.raises(ConfigError, match="kv_cache_dtype is int4, but must be 'auto' or 'fp8'"):
        resolve(EngineConfig(kv_cache_dtype="int4"), **MODEL_AND_MACHINE)
    with pytest.raises(ConfigError, match="kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9"):
        resolve(EngineConfig(kv_cache_dtype="fp8"), **{**MODEL_AND_MACHINE, "has_fp8": False})
    flash = EngineConfig(kv_cache_dtype="fp8", attention_backend="flash")
    with pytest.raises(ConfigError, match="attention_backend 'flash': use 'fastest'"):
        resolve(flash, has_flash_attention=True, **MODEL_AND_MACHINE)
    resolve(replace(flash, kv_cache_dtype="auto"), has_flash_attention=True, **MODEL_AND_MACHINE)
    on_cpu = resolve(EngineConfig(kv_cache_dtype="fp8", device="cpu"), **MODEL_AND_MACHINE)
    assert on_cpu.torch_kv_cache_dtype == torch.float8_e4m3fn


def test_a_model_may_prefer_a_dtype_on_a_gpu():
    def dtype(config: EngineConfig) -> torch.dtype:
        return resolve(config, cuda_dtype=torch.float16, **MODEL_AND_MACHINE).torch_dtype

    assert dtype(EngineConfig()) == torch.float16
    assert dtype(EngineConfig(device="cpu")) == torch.bfloat16
    assert dtype(EngineConfig(dtype="float32")) == torch.float32


def plan_num_blocks(free_bytes: int, **settings) -> int:
    config = resolve(EngineConfig(max_num_seqs=4, max_model_len=160, **settings), **MODEL_AND_MACHINE)
    layout = make_layout(PagedSpec(num_kv_heads=1, head_dim=16, num_heads=1))
    assert layout.block_bytes == 1024
    return plan_cache(config, layout, free_bytes).num_blocks


def test_a_prefix_cache_takes_all_free_memory():
    assert plan_num_blocks(1_024_000) == 999
    assert plan_num_blocks(1_024_000, device="cpu") == 999
    assert plan_num_blocks(30 * 1024) == 29
    assert plan_num_blocks(1 << 50) == MAX_CACHED_BLOCKS


def test_without_a_prefix_cache_blocks_are_for_running_requests():
    assert plan_num_blocks(1_024_000, prefix_caching=False) == 4 * 10
    assert plan_num_blocks(30 * 1024, prefix_caching=False) == 29


PAGED = PagedSpec(num_kv_heads=8, head_dim=128, num_heads=32)


def resolve_block_size(attention=PAGED, *, has_recurrent_layers=False, **settings) -> int:
    config = resolve(EngineConfig(**settings), has_flash_attention=True, **MODEL_AND_MACHINE)
    return choose_block_size(config, attention, has_recurrent_layers=has_recurrent_layers)


@pytest.fixture
def flash_attention(monkeypatch):
    monkeypatch.setattr("nanovllm_kernels.attention.gqa.has_flash_attention", lambda: True)


@pytest.mark.usefixtures("flash_attention")
def test_blocks_have_128_tokens_for_flash_attention():
    assert resolve_block_size() == 128
    assert resolve_block_size(block_size=32) == 32


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    "others",
    [
        {"attention_backend": "triton"},
        {"kv_cache_dtype": "fp8"},
        {"attention": PAGED._replace(head_dim=256)},
        {"attention": MLASpec(latent_dim=512, rope_dim=64, num_heads=128)},
        {"has_recurrent_layers": True},
        {"max_num_seqs": 100, "max_num_batched_tokens": 200},
        {"device": "cpu"},
    ],
)
def test_blocks_have_16_tokens_if_long_blocks_are_not_faster_or_do_not_fit(others):
    assert resolve_block_size(**others) == 16


def test_block_size_above_the_checkpoint_interval_is_refused():
    with pytest.raises(ConfigError, match="block_size is 128, but must be at most 64 for a model with recurrent"):
        resolve_block_size(block_size=128, has_recurrent_layers=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_zeros_are_aligned_and_writable(dtype):
    for shape in [(3, 5), (1000, 7, 1), (1,)]:
        found = allocate_zeros(shape, dtype, CPU)
        assert (found.shape, found.dtype, found.data_ptr() % 64) == (shape, dtype, 0)
        assert not found.float().any()
        found.fill_(1)
        assert bool((found.float() == 1).all())


# Writing "5" to this file sets the peak to the memory in use.
PEAK_RESET = Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """Peak memory of this process since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


@pytest.mark.skipif(not PEAK_RESET.exists(), reason="needs Linux, to reset the peak of memory")
def test_a_large_cache_takes_no_memory_before_it_is_used():
    # Reset the peak to the current memory: an earlier test may have had a higher peak.
    PEAK_RESET.write_text("5")
    bytes_before = peak_bytes()
    cache = allocate_zeros((1 << 10, 1 << 20), torch.bfloat16, CPU)
    cache[5] = 1
    assert float(cache[5, 7]) == 1
    assert peak_bytes() - bytes_before < 64 << 20


STATE_SPECS = [StateSpec((2, 3, 5), (4, 6)), StateSpec((1, 2, 2), (2, 4)), StateSpec((2, 3, 5), (4, 6))]


def make_filled_memory(num_state_slots: int, state_dtype: torch.dtype) -> CacheMemory:
    memory = CacheMemory(make_layout(PAGED, *STATE_SPECS, state_dtype=state_dtype), CPU)
    memory.allocate(0, num_state_slots)
    for cache in memory.state_caches:
        for states in cache:
            states.copy_(torch.randn(states.shape))
    return memory


def as_tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_ordered_copies_equal_simultaneous_copies(state_dtype):
    rng = random.Random(0)
    num_reordered = num_with_cycles = 0
    for _ in range(200):
        num_state_slots = rng.randrange(1, 12)
        targets = rng.sample(range(1, num_state_slots + 1), rng.randrange(1, num_state_slots + 1))
        copies = [(rng.randrange(1, num_state_slots + 1), target) for target in targets]
        ordered = order_slot_copies(copies)
        memory = make_filled_memory(num_state_slots, state_dtype)
        expected = [states.clone() for cache in memory.state_caches for states in cache]
        for states in expected:
            sources, targets = map(as_tensor, map(list, zip(*copies, strict=True)))
            states.index_copy_(0, targets, states.index_select(0, sources))
        memory.copy_states(*map(as_tensor, map(list, zip(*ordered, strict=True))))
        found = [states for cache in memory.state_caches for states in cache]
        assert all(torch.equal(states[1:], wanted[1:]) for states, wanted in zip(found, expected, strict=True))
        num_reordered += ordered != copies
        num_with_cycles += len(ordered) > len(copies)
        assert (len(ordered) == len(copies)) == all(target != NULL_SLOT for _, target in ordered)
    assert num_reordered > 20
    assert num_with_cycles > 20


def test_copies_that_do_not_overlap_keep_their_order():
    copies = [(1, 5), (1, 4), (2, 3)]
    assert order_slot_copies(copies) == copies
    assert order_slot_copies([]) == []


def test_chain_of_copies_takes_no_extra_copy():
    chain = [(index + 1, index) for index in range(1, 300)]
    random.Random(0).shuffle(chain)
    assert order_slot_copies(chain) == sorted(chain, key=lambda copy: copy[1])


def test_state_caches_have_the_shapes_of_their_layers():
    caches = make_filled_memory(3, torch.float32).state_caches
    assert [(*cache.recurrent.shape[1:],) for cache in caches] == [spec.recurrent for spec in STATE_SPECS]
    assert [(*cache.conv_inputs.shape,) for cache in caches] == [(4, *spec.conv_inputs) for spec in STATE_SPECS]
    assert len({states.data_ptr() for cache in caches for states in cache}) == 6


def test_slots_have_space_for_the_inputs_of_drafts():
    config = resolve(EngineConfig(), **MODEL_AND_MACHINE)
    plain, drafted = (CacheLayout.from_specs([PAGED, *STATE_SPECS], config, max_drafts) for max_drafts in (0, 3))
    assert plain.state_specs == tuple(STATE_SPECS)
    # Each draft adds two rows. Each row also holds two gates per value head.
    assert [spec.conv_inputs for spec in drafted.state_specs] == [(10, 6 + 4), (8, 4 + 2), (10, 6 + 4)]
    assert [spec.recurrent for spec in drafted.state_specs] == [spec.recurrent for spec in STATE_SPECS]
    added_elements = 2 * (10 * 10 - 4 * 6) + (8 * 6 - 2 * 4)
    assert drafted.slot_bytes - plain.slot_bytes == added_elements * 2


def test_second_allocation_replaces_all_tensors():
    memory = CacheMemory(make_layout(PAGED, *STATE_SPECS), CPU)
    for num_blocks, num_state_slots in [(5, 2), (3, 4)]:
        memory.allocate(num_blocks, num_state_slots)
        assert (memory.num_blocks, memory.num_state_slots) == (num_blocks, num_state_slots)
        assert memory.kv_caches[0].shape[0] == num_blocks + 1
        assert {states.shape[0] for cache in memory.state_caches for states in cache} == {num_state_slots + 1}
        assert sum(states.nbytes for cache in memory.state_caches for states in cache) == memory.state_bytes
