"""Runs of one engine over a list of prompts."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm_core import AsyncEngine, EngineConfig, Request, RequestOutput, SamplingParams
from nanovllm_core.engine.status import EngineStats
from nanovllm_models import load

OUTPUT_LEN, NUM_TOP = 6, 20


class Scores(NamedTuple):
    """start: the first position with scores. The scores at position p are those of the token at position p + 1.

    ids: int64 [positions, NUM_TOP + 1], the next token, then the likeliest tokens.
    logprobs: float32 [positions, NUM_TOP + 1]
    """

    start: int
    ids: Tensor
    logprobs: Tensor


@dataclass
class Run:
    """scores: empty if the requests asked for no log-probabilities."""

    answers: list[list[int]]
    num_cached: list[int]
    scores: list[Scores]


@dataclass
class Observation:
    """The repeated run may use cached prefixes. The prompt-scored run computes whole prompts."""

    first: Run
    repeated: Run
    prompt_scored: Run
    stats: EngineStats


async def observe(path: Path, config: EngineConfig, prompts: list[list[int]]) -> Observation:
    engine = await AsyncEngine.start(load(path), config)

    async def collect(prompt: list[int], name: str, options: dict[str, int]) -> list[RequestOutput]:
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, **options)
        return [output async for output in engine.generate(Request(name, prompt, sampling))]

    async def run(**options: int) -> Run:
        collected = await asyncio.gather(
            *(collect(prompt, f"r{index}", options) for index, prompt in enumerate(prompts))
        )
        return Run(
            [read_tokens(outputs) for outputs in collected],
            [outputs[0].num_cached_tokens for outputs in collected],
            [read_scores(*pair) for pair in zip(prompts, collected, strict=True)] if options else [],
        )

    try:
        return Observation(
            await run(),
            await run(logprobs=NUM_TOP),
            await run(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP),
            engine.stats,
        )
    finally:
        await engine.stop()


def read_tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def read_scores(prompt: list[int], outputs: list[RequestOutput]) -> Scores:
    entries = [entry for output in outputs for entry in output.logprobs]
    top_ids = np.array([[token for token, _ in entry.top] for entry in entries])
    top_logprobs = np.array([[logprob for _, logprob in entry.top] for entry in entries], np.float32)
    own_logprobs = np.array([entry.logprob for entry in entries], np.float32)
    start, packed = len(prompt) - 1, outputs[0].prompt_logprobs
    if packed:
        start -= len(packed)
        top_ids = np.concatenate((np.frombuffer(packed.top_ids, np.int32).reshape(-1, NUM_TOP), top_ids))
        prompt_logprobs = np.frombuffer(packed.top_logprobs, np.float32).reshape(-1, NUM_TOP)
        top_logprobs = np.concatenate((prompt_logprobs, top_logprobs))
        own_logprobs = np.concatenate((np.frombuffer(packed.logprobs, np.float32), own_logprobs))
    own_ids = np.array((prompt + read_tokens(outputs))[start + 1 :])
    return Scores(
        start,
        torch.from_numpy(np.concatenate((own_ids[:, None], top_ids), 1)),
        torch.from_numpy(np.concatenate((own_logprobs[:, None], top_logprobs), 1)),
    )
