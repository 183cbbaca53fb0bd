"""Builds an engine's loop."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from nanovllm_core.anonymous_memory import AnonymousMemory
from nanovllm_core.cache.block_files import BlockFiles
from nanovllm_core.cache.entry_identity import make_entry_identity
from nanovllm_core.cache.file_tier import FileTier
from nanovllm_core.cache.host_memory import EntryKind, allocate_host_memory
from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.shared_directory import load_secret
from nanovllm_core.cache.state_pool import StatePool
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.config import GIB, MIXED_STEP_LIMIT_S, PROMPT_STEP_LIMIT_S, EngineConfig, ResolvedConfig
from nanovllm_core.config_resolution import resolve
from nanovllm_core.engine.loop import EngineLoop
from nanovllm_core.engine.ranks import FAILED_START_TIMEOUT_S, RankProcesses
from nanovllm_core.engine.report import describe_engine
from nanovllm_core.engine.thread_names import ENGINE_THREAD_NAME
from nanovllm_core.engine.trace import StepTracer, TraceFile
from nanovllm_core.errors import ConfigError
from nanovllm_core.execution.entry_copier import EntryCopier, make_copier
from nanovllm_core.execution.runner import Runner, start_runner
from nanovllm_core.grammar.grammars import Grammars
from nanovllm_core.model import ModelSpec
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.draft_times import DraftLimits, DraftTimes, measure_draft_times
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.scheduling.step_time import StepTimeModel, calibrate
from nanovllm_core.start_phases import log_phase
from nanovllm_core.transfer.secret import TransferKeys, read_transfer_secret
from nanovllm_core.transfer.transfers import Transfers
from nanovllm_kernels.openmp_spinning import SpinControl, can_shorten_spins
from nanovllm_kernels.platform import has_cuda, has_cute, has_flash_attention, has_fp8

Result = TypeVar("Result")


async def build_loop(spec: ModelSpec, config: EngineConfig, directory: Path | None = None) -> EngineLoop:
    """Load the model, allocate the cache and time a few steps.

    directory: for temporary files; None for the system's directory.
    Raises ConfigError and the exceptions of `spec.build`.
    """
    if any(not 0 <= token_id < spec.vocab_size for token_id in spec.eos_token_ids):
        raise ConfigError(f"eos_token_ids is {spec.eos_token_ids}, but all ids must be from 0 to {spec.vocab_size - 1}")
    resolved = resolve(
        config,
        max_position=spec.max_position if spec.draft is None else min(spec.max_position, spec.draft.max_position),
        model_dtype=spec.dtype,
        cuda_dtype=spec.cuda_dtype,
        has_cuda=has_cuda(),
        has_flash_attention=has_flash_attention(),
        has_cute=has_cute(),
        has_fp8=has_fp8(),
        num_gpus=torch.cuda.device_count(),
    )
    # Open files before loading the model, so that an unusable path fails at once.
    hash_secret = None if resolved.kv_offload_dir is None else load_secret(resolved.kv_offload_dir)
    transfer_secret = None
    if resolved.uses_transfer and resolved.transfer_secret_file is not None:
        transfer_secret = read_transfer_secret(resolved.transfer_secret_file)
        hash_secret = transfer_secret.hash_secret
    async with AsyncExitStack() as cleanup:
        # These callbacks run if the start fails.
        trace_file = None if resolved.trace is None else cleanup.enter_context(closing(TraceFile(resolved.trace)))
        spin_control = SpinControl(is_on=resolved.device == "cpu" and can_shorten_spins())
        cleanup.callback(spin_control.close)
        executor = ThreadPoolExecutor(1, ENGINE_THREAD_NAME)
        cleanup.callback(executor.shutdown, wait=False)
        host_memory = allocate_host_memory(resolved)
        ranks = RankProcesses(spec, resolved, host_memory, directory) if resolved.tensor_parallel_size > 1 else None
        if ranks is not None:
            cleanup.push_async_callback(_end_ranks, ranks, executor)
        start_rank_0 = partial(_start_rank_0, spec, resolved, ranks, host_memory)
        runner, copier = await _run_on_thread(executor, ranks, start_rank_0)
        if copier is not None:
            cleanup.callback(copier.close)
        step_time_model = StepTimeModel()
        tier = _make_tier(spec, resolved, runner, step_time_model, copier)
        if tier is not None:
            cleanup.callback(tier.close)
        token_limits = resolved.max_tokens_per_group, runner.max_model_len
        with log_phase("calibration"):
            await _run_on_thread(executor, ranks, partial(calibrate, step_time_model, runner.time_step, *token_limits))
            draft_times = await _run_on_thread(executor, ranks, partial(_measure_drafts, resolved, runner))
        if copier is not None:
            copier.memory.allow_pinning()
        scheduler = _make_scheduler(spec, resolved, runner, step_time_model, draft_times, tier, hash_secret)
        transfers = _make_transfers(spec, resolved, runner, copier, scheduler, transfer_secret)
        cleanup.pop_all()
    vocabulary = spec.vocabulary
    grammars = None if vocabulary is None else Grammars(vocabulary, spec.vocab_size, spec.eos_token_ids)
    return EngineLoop(
        scheduler,
        runner,
        copier,
        transfers,
        describe_engine(spec, resolved, runner, transfers),
        resolved.depth,
        executor,
        spin_control,
        None if trace_file is None else StepTracer(trace_file, runner.device),
        grammars,
        ranks,
    )


async def _end_ranks(ranks: RankProcesses, executor: ThreadPoolExecutor) -> None:
    await asyncio.to_thread(ranks.close)
    leaving = asyncio.get_running_loop().run_in_executor(executor, ranks.abandon)
    await asyncio.wait([leaving], timeout=FAILED_START_TIMEOUT_S)


def _start_rank_0(
    spec: ModelSpec, config: ResolvedConfig, ranks: RankProcesses | None, host_memory: AnonymousMemory | None
) -> tuple[Runner, EntryCopier | None]:
    runner = start_runner(spec, config) if ranks is None else ranks.start_rank_0(spec)
    return runner, make_copier(runner.cache, config, host_memory, runner.parallel, runner.plan_publisher)


async def _run_on_thread(
    executor: ThreadPoolExecutor, ranks: RankProcesses | None, function: Callable[[], Result]
) -> Result:
    """Run a function on the engine's thread. If another rank ends meanwhile, raise that rank's failure instead."""
    event_loop = asyncio.get_running_loop()
    result_future = event_loop.run_in_executor(executor, function)
    if ranks is None:
        return await result_future
    # If another rank's failure is raised instead, nothing else reads this exception, and asyncio would print it.
    result_future.add_done_callback(lambda future: future.cancelled() or future.exception())
    failure_future = event_loop.create_future()

    def end_wait() -> None:
        if not failure_future.done():
            failure_future.set_result(None)

    ranks.set_failure_callback(lambda: event_loop.call_soon_threadsafe(end_wait))
    await asyncio.wait((result_future, failure_future), return_when=asyncio.FIRST_COMPLETED)
    if failure_future.done():
        # `close` ends the other ranks. A thread that waits for them then continues on a CPU, but maybe not on a GPU.
        await asyncio.to_thread(ranks.close)
        await asyncio.wait([result_future], timeout=FAILED_START_TIMEOUT_S)
        ranks.check()
    try:
        return await result_future
    except ValueError:
        raise
    except Exception:
        # The end of another rank may be the cause. If so, raise that rank's failure.
        await asyncio.to_thread(ranks.wait_for_failure)
        raise


def _make_tier(
    spec: ModelSpec,
    config: ResolvedConfig,
    runner: Runner,
    step_time_model: StepTimeModel,
    copier: EntryCopier | None,
) -> HostTier | None:
    if copier is None:
        return None
    files = None
    if config.kv_offload_dir is not None:
        max_bytes = int(config.kv_offload_disk_gib * GIB)
        identity = repr(make_entry_identity(spec, config, runner.cache.layout))
        stores = [
            BlockFiles(config.kv_offload_dir, max_bytes, f"{EntryKind(kind).name} {identity}".encode(), slot_bytes)
            for kind, slot_bytes in enumerate(copier.memory.layout.slot_bytes)
        ]
        files = FileTier(stores, copier.memory)
    return HostTier(copier.memory, runner.cache.layout.block_size, step_time_model.chunk_seconds, files)


def _make_transfers(
    spec: ModelSpec,
    config: ResolvedConfig,
    runner: Runner,
    copier: EntryCopier | None,
    scheduler: Scheduler,
    secret: TransferKeys | None,
) -> Transfers | None:
    if secret is None or copier is None or scheduler.tier is None:
        return None
    identity = make_entry_identity(spec, config, runner.cache.layout)
    return Transfers(
        config, secret, identity, copier.memory, scheduler, scheduler.tier, spec.vocab_size, runner.max_model_len
    )


def _find_draft_limits(config: ResolvedConfig, runner: Runner) -> DraftLimits:
    proposer = runner.proposer
    if proposer is None:
        return DraftLimits()
    return DraftLimits(config.max_drafts, config.max_draft_step_tokens, proposer.uses_cache, proposer.can_lag)


def _measure_drafts(config: ResolvedConfig, runner: Runner) -> DraftTimes:
    """Measure how drafts change the times of steps."""
    limits = _find_draft_limits(config, runner)
    if not limits.max_drafts:
        return DraftTimes()
    return measure_draft_times(runner.time_decodes, config.max_seqs_per_group, limits)


def _make_scheduler(
    spec: ModelSpec,
    config: ResolvedConfig,
    runner: Runner,
    step_time_model: StepTimeModel,
    draft_times: DraftTimes,
    tier: HostTier | None,
    hash_secret: bytes | None,
) -> Scheduler:
    num_state_slots, block_size = runner.cache.num_state_slots, runner.cache.layout.block_size
    # The first group hashes all prompts, so all groups need equal hashes.
    hash_secret = hash_secret or secrets.token_bytes(32)
    caches = [
        CacheManager(
            runner.cache.num_blocks,
            block_size,
            prefix_caching=config.prefix_caching,
            hash_algorithm=config.prefix_hash,
            watermark=config.watermark,
            state_pool=StatePool(num_state_slots, config.max_seqs_per_group, block_size) if num_state_slots else None,
            tier=tier,
            hash_secret=hash_secret,
        )
        for _ in range(config.num_request_groups)
    ]
    limits = StepLimits(
        max_tokens=config.max_tokens_per_group,
        target_s=None if config.target_step_ms is None else config.target_step_ms / 1e3,
        prompt_step_limit_s=PROMPT_STEP_LIMIT_S[config.device],
        mixed_step_limit_s=MIXED_STEP_LIMIT_S[config.device],
        attention_estimator=runner.attention_estimator,
        padded_token_counts=runner.graphs.prompt_step_sizes,
    )
    return Scheduler(
        caches,
        max_num_seqs=config.max_num_seqs,
        limits=limits,
        max_model_len=runner.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        seed=config.seed,
        step_time_model=step_time_model,
        draft_limits=_find_draft_limits(config, runner),
        draft_times=draft_times,
        tier=tier,
    )
