"""Runs `throughput`, `latency` or `prefill` on a peer (another engine) if the user names one, then on our engine.

The peer's process ends before our engine starts, so that the engines never share the machine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from nanovllm_core import EngineConfig, ModelSpec
from nanovllm_server.bench import charts
from nanovllm_server.bench.engine_defaults import find_device_and_dtype
from nanovllm_server.bench.offline.cases import Case, OfflineBenchmark
from nanovllm_server.bench.offline.engine_runs import WARM_UP_TOKENS, RunTiming, time_engine
from nanovllm_server.bench.offline.peer_process import Peer, PeerDraftHeads, PeerJob, PeerResult, run_peer
from nanovllm_server.bench.report import InvalidSettingsError, OutputFiles, report
from nanovllm_server.protocol.json import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Options of a run. config: for our engine; `_make_peer_job` lists the fields that also apply to the peer.

    peer: the engine to compare with; None for no comparison.
    """

    model: Path
    load_format: Literal["auto", "dummy"]
    config: EngineConfig
    temperature: float
    repeat: int
    peer: Peer | None
    files: OutputFiles


def run(options: OfflineOptions, spec: ModelSpec, benchmark: OfflineBenchmark) -> None:
    """Measures and reports all cases.

    Raises BenchError (invalid options, or the peer failed) and the errors of `time_engine`.
    """
    config = options.config
    device, dtype = find_device_and_dtype(spec, config)
    _check_options(options, spec, benchmark, device)
    peer_result = run_peer(options.peer, _make_peer_job(options, benchmark, device, dtype)) if options.peer else None
    engine_timings = asyncio.run(
        time_engine(
            spec,
            config,
            [case.requests for case in benchmark.cases],
            options.temperature,
            options.repeat,
            needs_time_to_all_first_tokens=benchmark.needs_time_to_all_first_tokens,
        )
    )
    peer_timings = peer_result.timings if peer_result else [None] * len(benchmark.cases)
    model_line = f"{spec.name} in {dtype} on {device}"
    report(
        benchmark.command,
        f"{benchmark.title}; {model_line}, median of {options.repeat}",
        [_make_table(benchmark, engine_timings, peer_result)],
        {
            "peer": None if peer_result is None else {"name": peer_result.name, "version": peer_result.version},
            "model": spec.name,
            "load_format": options.load_format,
            "dtype": dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "state_dtype": config.state_dtype,
            "device": device,
            "temperature": options.temperature,
            "repeat": options.repeat,
            "unit": benchmark.rate_unit,
            "cases": [*map(_case_figures, benchmark.cases, engine_timings, peer_timings)],
        },
        options.files,
    )
    if options.files.plot is not None:
        rates_by_engine = {"nanovllm": _median_rates(benchmark, engine_timings)}
        if peer_result is not None:
            rates_by_engine[peer_result.name] = _median_rates(benchmark, peer_result.timings)
        case_names = [case.name for case in benchmark.cases]
        title = f"{benchmark.title}\n{model_line}"
        charts.draw_grouped_bars(options.files.plot, title, benchmark.rate_unit, case_names, rates_by_engine)


def _check_options(options: OfflineOptions, spec: ModelSpec, benchmark: OfflineBenchmark, device: str) -> None:
    """Raises InvalidSettingsError for options that would otherwise fail only after the peer has run for minutes."""
    max_model_len = options.config.max_model_len or spec.max_position
    max_length = max(len(request.prompt) + request.max_tokens for case in benchmark.cases for request in case.requests)
    if max_length > max_model_len:
        raise InvalidSettingsError(f"requests of up to {max_length} tokens don't fit into a context of {max_model_len}")
    if options.peer is not None and options.peer.gguf is not None and device != "cpu":
        raise InvalidSettingsError("peer llamacpp computes on the CPU: add --device cpu")
    method = options.config.speculate
    if options.peer is not None and method is not None and (options.peer.name, method) != ("vllm", "mtp"):
        raise InvalidSettingsError(
            f"--peer {options.peer.name} can't use --speculate {method}: only vllm can, and only mtp"
        )


def _make_peer_job(options: OfflineOptions, benchmark: OfflineBenchmark, device: str, dtype: str) -> PeerJob:
    config = options.config
    return PeerJob(
        model=str(options.model.resolve()),
        load_format=options.load_format,
        device=device,
        dtype=dtype,
        threads=torch.get_num_threads(),
        gguf=None if options.peer is None else options.peer.gguf,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        prefix_caching=config.prefix_caching,
        state_dtype=config.state_dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel=config.expert_parallel,
        draft_heads=PeerDraftHeads(config.num_speculative_tokens, config.acceptance_length)
        if config.speculate
        else None,
        temperature=options.temperature,
        repeat=options.repeat,
        needs_time_to_all_first_tokens=benchmark.needs_time_to_all_first_tokens,
        warm_up_tokens=WARM_UP_TOKENS,
        cases=[case.requests for case in benchmark.cases],
    )


def _make_table(
    benchmark: OfflineBenchmark, engine_timings: list[list[RunTiming]], peer: PeerResult | None
) -> list[list[str]]:
    header = ["", "tokens in", "tokens out", "seconds", f"nanovllm {benchmark.rate_unit}"]
    rates = _median_rates(benchmark, engine_timings)
    rows = [
        [
            case.name,
            str(case.num_prompt_tokens),
            str(timings[0].num_tokens),
            f"{median(timing.last_token_s for timing in timings):.2f}",
            f"{rate:.1f}",
        ]
        for case, timings, rate in zip(benchmark.cases, engine_timings, rates, strict=True)
    ]
    acceptance_lengths = [timing.acceptance_length for timings in engine_timings for timing in timings]
    if any(length is not None for length in acceptance_lengths):
        header.append("tokens per step with drafts")
        for row, timings in zip(rows, engine_timings, strict=True):
            lengths = [timing.acceptance_length for timing in timings if timing.acceptance_length is not None]
            row.append(f"{median(lengths):.2f}" if lengths else "none")
    if peer is not None:
        header += [f"{peer.name} {peer.version} {benchmark.rate_unit}", "ratio"]
        for row, rate, peer_rate in zip(rows, rates, _median_rates(benchmark, peer.timings), strict=True):
            row += [f"{peer_rate:.1f}", f"{rate / peer_rate:.2f}"]
    return [header, *rows]


def _median_rates(benchmark: OfflineBenchmark, timings_by_case: Sequence[list[RunTiming]]) -> list[float]:
    return [case.median_rate(timings) for case, timings in zip(benchmark.cases, timings_by_case, strict=True)]


def _case_figures(case: Case, engine_timings: list[RunTiming], peer_timings: list[RunTiming] | None) -> JSON:
    def engine_figures(timings: list[RunTiming]) -> JSON:
        runs: list[JSON] = [
            {
                "num_tokens": run.num_tokens,
                "last": run.last_token_s,
                "first": run.all_first_tokens_s,
                "acceptance_length": run.acceptance_length,
            }
            for run in timings
        ]
        return {"rate": case.median_rate(timings), "rates": [*map(case.compute_rate, timings)], "runs": runs}

    return {
        "case": case.name,
        "requests": len(case.requests),
        "prompt_tokens": case.num_prompt_tokens,
        "output_tokens": engine_timings[0].num_tokens,
        "nanovllm": engine_figures(engine_timings),
        "peer": None if peer_timings is None else engine_figures(peer_timings),
        "ratio": None if peer_timings is None else case.median_rate(engine_timings) / case.median_rate(peer_timings),
    }
