"""Collects the properties and the statistics that an engine reports."""

import math
from typing import Any

from nanovllm_core.cache.host_memory import Direction
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.engine.status import EngineInfo, EngineStats
from nanovllm_core.execution.runner import Runner
from nanovllm_core.model import ModelSpec
from nanovllm_core.scheduling.lifecycle import STEP_CLASS_MAX_TOKENS
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.transfer.transfers import Transfers
from nanovllm_kernels.platform import describe_arithmetic


def describe_engine(spec: ModelSpec, config: ResolvedConfig, runner: Runner, transfers: Transfers | None) -> EngineInfo:
    """The constant properties of an engine."""
    server = None if transfers is None else transfers.server
    cache, num_caches = runner.cache, config.num_request_groups
    return EngineInfo(
        model=spec.name,
        device=runner.device_name,
        dtype=config.dtype,
        vocab_size=spec.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=cache.layout.block_size,
        num_blocks=num_caches * cache.num_blocks,
        kv_cache_dtype=str(config.torch_kv_cache_dtype).removeprefix("torch."),
        kv_cache_bytes=num_caches * cache.kv_bytes,
        num_state_slots=num_caches * cache.num_state_slots,
        state_bytes=num_caches * cache.state_bytes,
        prefix_caching=config.prefix_caching,
        attention_backend=config.attention_backend,
        supports_grammars=spec.vocabulary is not None,
        num_ranks=config.tensor_parallel_size,
        draft_method=config.speculate,
        transfer_engine_id="" if server is None else server.engine_id,
        transfer_address="" if server is None else server.address,
        transfer_peers=config.transfer_peers,
        matmul_arithmetic=describe_arithmetic(runner.device, config.torch_dtype),
    )


def collect_stats(scheduler: Scheduler, runner: Runner, transfers: Transfers | None) -> EngineStats:
    """All statistics except the number of waiting requests, which the event loop's thread counts."""
    pools = [cache.pool for cache in scheduler.caches]
    slot_pools = [cache.state_pool.slots for cache in scheduler.caches if cache.state_pool is not None]
    counters, step_time_model = scheduler.counters, scheduler.step_time_model
    planner = scheduler.draft_planner
    return EngineStats(
        num_requests_running=scheduler.rows.num_running,
        num_blocks=sum(pool.num_blocks for pool in pools),
        num_free_blocks=sum(pool.num_free for pool in pools),
        num_cached_blocks=sum(pool.num_cached for pool in pools),
        num_free_state_slots=sum(slots.num_free for slots in slot_pools),
        num_checkpoints=sum(slots.num_cached for slots in slot_pools),
        num_steps=counters.num_steps,
        num_preemptions=counters.num_preemptions,
        num_queried_prompt_tokens=counters.num_queried_tokens,
        num_cached_prompt_tokens=counters.num_cached_tokens,
        prompt_tokens=counters.num_prompt_tokens,
        generation_tokens=counters.num_generated_tokens,
        num_computed_tokens=counters.num_computed_tokens,
        num_steps_by_size=tuple(zip((*STEP_CLASS_MAX_TOKENS, math.inf), counters.num_steps_by_size, strict=True)),
        graph_steps=tuple((*key, count) for key, count in list(runner.graphs.num_steps.items())),
        verified_drafts_by_position=() if planner is None else tuple(planner.num_verified.tolist()),
        accepted_drafts_by_position=() if planner is None else tuple(planner.num_accepted.tolist()),
        **({} if scheduler.tier is None else _collect_tier_stats(scheduler.tier)),
        **({} if transfers is None else _collect_transfer_stats(transfers)),
        step_limit_s=scheduler.limits.time_limit_s(step_time_model.decode_step_s),
        decode_step_s=step_time_model.decode_step_s,
        step_time_coefficients=tuple(step_time_model.coefficients._asdict().items()),
        step_time_error=step_time_model.mean_error,
    )


def _collect_tier_stats(tier: HostTier) -> dict[str, Any]:
    """The statistics of host memory and files."""
    counters, files = tier.counters, tier.files
    loaded_tokens = [("host", counters.num_loaded_tokens - counters.num_file_tokens)]
    copied_bytes = [(direction.name.lower(), counters.num_bytes[direction]) for direction in Direction]
    copy_s = [(direction.name.lower(), counters.copy_s[direction]) for direction in Direction]
    if files is not None:
        loaded_tokens.append(("disk", counters.num_file_tokens))
        copied_bytes += [("write", files.bytes_written), ("read", files.bytes_read)]
        copy_s += [("write", files.write_s), ("read", files.read_s)]
    return {
        "loaded_tokens": tuple(loaded_tokens),
        "rejected_load_tokens": counters.num_rejected_tokens,
        "num_held_host_slots": sum(pool.num_blocks - pool.num_free for pool in tier.pools),
        "num_failed_loads": counters.num_failed_loads,
        "load_wait_s": counters.wait_s,
        "copied_bytes": tuple(copied_bytes),
        "copy_s": tuple(copy_s),
    }


def _collect_transfer_stats(transfers: Transfers) -> dict[str, Any]:
    fetch_counters, num_served_bytes, num_leases = transfers.collect_stats()
    return {
        "fetches": tuple((str(outcome), count) for outcome, count in fetch_counters.outcomes.items()),
        "fetched_tokens": fetch_counters.num_tokens,
        "fetched_bytes": fetch_counters.num_bytes,
        "fetch_s": fetch_counters.wait_s,
        "served_bytes": num_served_bytes,
        "num_leases": num_leases,
    }
