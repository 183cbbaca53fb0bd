"""Runs each prompt in turn on two engines, with and without drafts. Each engine has a process of its own."""

import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from itertools import count, takewhile

from tqdm import tqdm

from nanovllm_core import Engine, EngineClient, EngineConfig, ModelSpec, Request, RequestOutput, SamplingParams
from nanovllm_server.bench.report import BenchError

# Pause before each run. An engine on a CPU measures every 0.2 s how many cores other processes use, and may slow down.
# After the pause, this measurement excludes the other engine's last run.
PAUSE_S = 0.5
# Time limit of a step, so long that both engines cut a prompt into the same chunks. Other chunks change the last bits
# of keys, and sometimes tokens, even without drafts.
STEP_LIMIT_MS = 60_000.0
# Number of likeliest tokens whose log-probabilities are read. `Difference.margin` is None if one of the differing
# tokens is not among these.
_NUM_TOP_TOKENS = 20


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One answer of one engine.

    decode_s: seconds from the output with the first token to the last output.
    num_decoded: number of tokens after the output with the first token.
    num_accepted, num_rejected: numbers of drafts (proposed tokens) that the engine accepted and rejected.
    """

    token_ids: tuple[int, ...]
    decode_s: float
    num_decoded: int
    num_accepted: int
    num_rejected: int

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second."""
        return self.num_decoded / self.decode_s


@dataclass(frozen=True, slots=True)
class RunPair:
    """The answers of both engines to one prompt in one round."""

    plain: TimedRun
    drafted: TimedRun

    @property
    def ratio(self) -> float:
        """The rate with drafts, divided by the rate without drafts."""
        return self.drafted.tokens_per_s / self.plain.tokens_per_s

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None if all token ids are equal."""
        plain_ids, drafted_ids = self.plain.token_ids, self.drafted.token_ids
        if plain_ids == drafted_ids:
            return None
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain_ids, drafted_ids, strict=False)))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which the answers to a prompt differ. The token of an answer that has already ended is None.

    margin: log-probability of `token_without_drafts` minus that of `token_with_drafts`; None if either is unknown.
    """

    round_index: int
    position: int
    token_without_drafts: int | None
    token_with_drafts: int | None
    margin: float | None


@dataclass(frozen=True, slots=True)
class PromptRuns:
    """The runs of one prompt: a pair per round, and the differences of the pairs."""

    pairs: list[RunPair]
    differences: list[Difference]


async def run_pairs(
    spec: ModelSpec,
    config: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    warm_up_indices: Sequence[int],
    num_rounds: int,
    max_tokens: int,
) -> list[PromptRuns]:
    """Starts both engines, and runs every prompt on both in each round. Returns the runs by prompt.

    The two runs of a pair follow each other directly. Their order changes from pair to pair. After the last round, the
    engine without drafts runs once more for each difference, to measure its margin.

    config: for the engine with drafts; the other engine differs only in `speculate`. Both ignore `target_step_ms`.
    warm_up_indices: indices of the prompts that both engines answer before the first round.
    max_tokens: maximum length of an answer, at least 2.

    Raises ConfigError, ModelError, RequestError (a prompt does not fit), EngineDeadError, and BenchError (all tokens of
    an answer arrived at once).
    """
    async with AsyncExitStack() as stack:
        engines: list[EngineClient] = []
        for speculate in (None, config.speculate):
            engine = await EngineClient.launch(spec, replace(config, speculate=speculate, target_step_ms=STEP_LIMIT_MS))
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        # A garbage collection of torch's objects would delay the reading of outputs by 0.2 s.
        gc.collect()
        gc.freeze()
        runner = PairRunner(engines[0], engines[1], max_tokens)
        for prompt in prompts:
            runner.check(prompt)
        pairs_by_prompt: list[list[RunPair]] = [[] for _ in prompts]
        num_pairs = len(warm_up_indices) + num_rounds * len(prompts)
        with tqdm(total=num_pairs, desc="speculation", unit="pair", disable=not sys.stderr.isatty()) as bar:
            for index in warm_up_indices:
                await runner.run_pair(prompts[index])
                bar.update()
            for _ in range(num_rounds):
                for prompt, pairs in zip(prompts, pairs_by_prompt, strict=True):
                    pairs.append(await runner.run_pair(prompt))
                    bar.update()
        return [
            PromptRuns(pairs, await runner.find_differences(prompt, pairs))
            for prompt, pairs in zip(prompts, pairs_by_prompt, strict=True)
        ]


class PairRunner:
    """Sends requests to an engine without drafts (`plain`) and to an engine with drafts (`drafted`)."""

    def __init__(self, plain: Engine, drafted: Engine, max_tokens: int):
        self._plain = plain
        self._drafted = drafted
        # `min_tokens` is 2 because the rate counts only the tokens after the first token.
        self._sampling = SamplingParams(max_tokens=max_tokens, min_tokens=2, temperature=0)
        self._pair_numbers = count()

    def check(self, prompt: tuple[int, ...]) -> None:
        """Raises RequestError if the prompt and its answer don't fit into the context."""
        self._plain.check(Request("check", prompt, self._sampling))

    async def run_pair(self, prompt: tuple[int, ...]) -> RunPair:
        """Runs a prompt on both engines, one after the other."""
        if next(self._pair_numbers) % 2:
            drafted = await self._run(self._drafted, prompt)
            return RunPair(await self._run(self._plain, prompt), drafted)
        plain = await self._run(self._plain, prompt)
        return RunPair(plain, await self._run(self._drafted, prompt))

    async def find_differences(self, prompt: tuple[int, ...], pairs: Sequence[RunPair]) -> list[Difference]:
        """Returns the difference of each pair whose token ids differ."""
        differences: list[Difference] = []
        for round_index, pair in enumerate(pairs):
            position = pair.first_difference
            if position is None:
                continue
            plain_token, drafted_token = (
                run.token_ids[position] if position < len(run.token_ids) else None for run in (pair.plain, pair.drafted)
            )
            margin = await self._measure_margin(prompt + pair.plain.token_ids[:position], plain_token, drafted_token)
            differences.append(Difference(round_index, position, plain_token, drafted_token, margin))
        return differences

    async def _measure_margin(
        self, prefix: tuple[int, ...], plain_token: int | None, drafted_token: int | None
    ) -> float | None:
        sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=_NUM_TOP_TOKENS)
        outputs = [output async for output in self._plain.generate(Request("margin", prefix, sampling))]
        logprobs = outputs[-1].logprobs
        top = dict(logprobs[0].top) if logprobs else {}
        if plain_token not in top or drafted_token not in top:
            return None
        return top[plain_token] - top[drafted_token]

    async def _run(self, engine: Engine, prompt: tuple[int, ...]) -> TimedRun:
        await asyncio.sleep(PAUSE_S)
        outputs: list[RequestOutput] = []
        times: list[float] = []
        async with aclosing(engine.generate(Request("run", prompt, self._sampling))) as stream:
            async for output in stream:
                outputs.append(output)
                times.append(time.perf_counter())
        token_ids = tuple(token for output in outputs for token in output.new_token_ids)
        num_decoded = len(token_ids) - len(outputs[0].new_token_ids)
        if num_decoded == 0:
            raise BenchError("all tokens of an answer arrived at once, which gives no rate: raise --output-len")
        return TimedRun(
            token_ids,
            times[-1] - times[0],
            num_decoded,
            outputs[-1].num_accepted_drafts,
            outputs[-1].num_rejected_drafts,
        )
