"""Runs one benchmark on a peer (another engine), if given, then on our engine, and shows both results.

The peer runs first, in its own process, so that the engines never use the machine at the same time.
"""

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from nanovllm_core import EngineConfig, ModelSpec
from nanovllm_server.bench import engine, plot
from nanovllm_server.bench.cases import Case, Program
from nanovllm_server.bench.engine import Timing
from nanovllm_server.bench.peers import Peer, PeerAnswer, PeerJob, ask
from nanovllm_server.bench.report import BenchError, Results, keep, machine, median, one_line, show
from nanovllm_server.protocol.json import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The options of a run. config: device, dtype and limits, which the peer gets too. peer: None for no peer."""

    model: Path
    load_format: Literal["auto", "dummy"]
    config: EngineConfig
    temperature: float
    repeat: int
    peer: Peer | None
    results: Results


def run(setting: Setting, spec: ModelSpec, program: Program) -> None:
    """Measures, shows a table, writes the figures.

    Raises BenchError if requests do not fit or the peer fails, and whatever `engine.measure` raises.
    """
    # The engine would raise this too, but only after the peer has run for minutes.
    context = setting.config.max_model_len or spec.max_position
    if (longest := max(len(work.prompt) + work.max_tokens for case in program.cases for work in case.works)) > context:
        raise BenchError(f"requests of up to {longest} tokens don't fit into a context of {context}")
    device = setting.config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if setting.peer is not None and setting.peer.gguf is not None and device != "cpu":
        raise BenchError("peer llamacpp computes on the CPU: add --device cpu")
    own_dtype = (spec.cuda_dtype if device == "cuda" else None) or spec.dtype
    dtype = str(setting.config.dtype or own_dtype).removeprefix("torch.")
    peer = ask(setting.peer, _peer_job(setting, program, device, dtype)) if setting.peer else None
    works = [case.works for case in program.cases]
    measuring = engine.measure(
        spec, setting.config, works, setting.temperature, setting.repeat, needs_first=program.needs_first
    )
    ours = asyncio.run(measuring)
    facts = machine()
    _show(setting, program, f"{setting.model.name} in {dtype} on {device}", one_line(facts), ours, peer)
    keep(
        setting.results.json,
        {
            "benchmark": program.name,
            "environment": facts,
            "peer": None if peer is None else {"name": peer.name, "version": peer.version},
            "model": setting.model.name,
            "load_format": setting.load_format,
            "dtype": dtype,
            "kv_cache_dtype": setting.config.kv_cache_dtype,
            "state_dtype": setting.config.state_dtype,
            "device": device,
            "temperature": setting.temperature,
            "repeat": setting.repeat,
            "unit": program.unit,
            "cases": [
                _figures(case, timings, peer.timings[index] if peer else None)
                for index, (case, timings) in enumerate(zip(program.cases, ours, strict=True))
            ],
        },
    )
    if setting.results.plot is not None:
        series = {"nanovllm": _rates(program, ours)}
        if peer is not None:
            series[peer.name] = _rates(program, peer.timings)
        title = f"{program.title}\n{setting.model.name} in {dtype} on {device}"
        plot.bars(setting.results.plot, title, program.unit, [case.name for case in program.cases], series)


def _peer_job(setting: Setting, program: Program, device: str, dtype: str) -> PeerJob:
    config = setting.config
    return PeerJob(
        model=str(setting.model.resolve()),
        load_format=setting.load_format,
        device=device,
        dtype=dtype,
        threads=torch.get_num_threads(),
        gguf=None if setting.peer is None else setting.peer.gguf,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        prefix_caching=config.prefix_caching,
        state_dtype=config.state_dtype,
        temperature=setting.temperature,
        repeat=setting.repeat,
        needs_first=program.needs_first,
        warm_up_tokens=engine.WARM_UP_TOKENS,
        cases=[case.works for case in program.cases],
    )


def _show(
    setting: Setting, program: Program, where: str, facts: str, ours: list[list[Timing]], peer: PeerAnswer | None
) -> None:
    header = ["", "tokens in", "tokens out", "seconds", f"nanovllm {program.unit}"]
    rates = _rates(program, ours)
    rows = [
        [
            case.name,
            str(case.prompt_tokens),
            str(timings[0].num_tokens),
            f"{median(timing.last for timing in timings):.2f}",
            f"{rate:.1f}",
        ]
        for case, timings, rate in zip(program.cases, ours, rates, strict=True)
    ]
    if peer is not None:
        header += [f"{peer.name} {peer.version} {program.unit}", "ratio"]
        for row, our, their in zip(rows, rates, _rates(program, peer.timings), strict=True):
            row += [f"{their:.1f}", f"{our / their:.2f}"]
    show(f"{program.title}; {where}, median of {setting.repeat}", facts, [header, *rows])


def _rates(program: Program, timings: list[list[Timing]]) -> list[float]:
    return [_rate(case, of_case) for case, of_case in zip(program.cases, timings, strict=True)]


def _rate(case: Case, timings: list[Timing]) -> float:
    return median(map(case.rate, timings))


def _figures(case: Case, ours: list[Timing], theirs: list[Timing] | None) -> JSON:
    def side(timings: list[Timing]) -> JSON:
        rates = [case.rate(timing) for timing in timings]
        return {"rate": median(rates), "rates": [*rates], "runs": [asdict(timing) for timing in timings]}

    return {
        "case": case.name,
        "requests": len(case.works),
        "prompt_tokens": case.prompt_tokens,
        "output_tokens": ours[0].num_tokens,
        "nanovllm": side(ours),
        "peer": None if theirs is None else side(theirs),
        "ratio": None if theirs is None else _rate(case, ours) / _rate(case, theirs),
    }
