from dataclasses import replace

import pytest
import torch

from nanovllm_core import ConfigError, EngineConfig, PagedSpec, StateSpec
from nanovllm_core.cache.host_memory import (
    PAGE_BYTES,
    Direction,
    EntryKind,
    HostLayout,
    HostMemory,
    allocate_host_memory,
)
from nanovllm_core.cache.memory import CacheLayout
from nanovllm_core.config_resolution import resolve

CONFIG = EngineConfig(device="cpu", kv_offload_gib=0.001, tensor_parallel_size=2, max_num_seqs=4)
ATTENTION, STATE = PagedSpec(2, 16, 4), StateSpec((2, 8, 8), (4, 32))


def resolve_config(config):
    return resolve(config, max_position=256, model_dtype=torch.float32, has_cuda=False)


def make_layout(config, specs):
    resolved = resolve_config(config)
    return HostLayout.plan(resolved, CacheLayout.from_specs(specs, resolved))


def make_memory(config=CONFIG, specs=(ATTENTION,)):
    memory = allocate_host_memory(resolve_config(config))
    assert memory is not None
    return HostMemory(memory, make_layout(config, specs))


def test_slots_fill_the_memory_and_begin_at_pages():
    layout = make_layout(CONFIG, (ATTENTION, ATTENTION, STATE))
    limit = int(CONFIG.kv_offload_gib * 2**30) + PAGE_BYTES
    assert layout.num_parts == layout.num_ranks == 2
    for kind in EntryKind:
        assert layout.slot_bytes[kind] % PAGE_BYTES == 0
        assert layout.slot_bytes[kind] >= 2 * layout.entry_bytes[kind]
        assert abs(layout.num_slots[kind] * layout.slot_bytes[kind] - limit / 2) < 2 * layout.slot_bytes[kind]
    assert limit - sum(layout.slot_bytes) <= layout.num_bytes <= limit


def test_slots_have_one_part_if_ranks_have_different_requests():
    layout = make_layout(replace(CONFIG, dp_attention=True), (ATTENTION,))
    assert (layout.num_ranks, layout.num_parts) == (2, 1)


def test_a_memory_without_space_for_one_entry_is_rejected():
    with pytest.raises(ConfigError, match="kv_offload_gib is 1e-06, but must be at least"):
        make_layout(replace(CONFIG, kv_offload_gib=1e-6), (ATTENTION,))


def test_a_slot_has_the_parts_of_all_ranks_and_no_bytes_of_other_slots():
    memory = make_memory()
    num_bytes, kind = memory.layout.entry_bytes[0], EntryKind.BLOCK
    for part in range(2):
        memory.part(kind, part)[1].fill_(7 + part)
    assert bytes(memory.slot(kind, 2)[: 2 * num_bytes]) == b"\x07" * num_bytes + b"\x08" * num_bytes
    assert not any(memory.slot(kind, 1))
    assert not any(memory.slot(kind, 3))
    assert sum(piece.numel() for piece in memory.pieces()) == memory.layout.num_slots[0] * memory.layout.slot_bytes[0]


def test_memory_is_ready_and_a_batch_is_done_once_all_ranks_say_so():
    memory = make_memory()
    assert not memory.is_ready
    memory.set_ready(0)
    assert not memory.is_ready
    memory.set_ready(1)
    assert memory.is_ready
    memory.count_done(0, Direction.LOAD)
    assert memory.num_done(Direction.LOAD) == 0
    memory.count_failure(1)
    memory.count_done(1, Direction.LOAD)
    assert memory.num_done(Direction.LOAD) == 1
    assert memory.num_done(Direction.STORE) == 0
    assert memory.num_failures == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_gib": -1.0}, "kv_offload_gib is -1.0, but must be at least 0"),
        ({"prefix_caching": False}, "kv_offload_gib is 0.001, but must be 0 without prefix_caching"),
        ({"kv_offload_gib": 0.0, "kv_offload_dir": "d"}, "kv_offload_dir is d, but must be left out if kv_offload"),
        ({"kv_offload_disk_gib": 0.0}, "kv_offload_disk_gib is 0.0, but must be above 0"),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve_config(replace(CONFIG, **settings))


def test_a_directory_needs_hashes_that_other_processes_compute_too(tmp_path):
    assert resolve_config(CONFIG).prefix_hash == "fast"
    assert resolve_config(replace(CONFIG, kv_offload_dir=tmp_path)).prefix_hash == "sha256"
