"""Steps stay within their time limits, on a simulated device."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.execution.graphs import mixed_sizes
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.plan import ScheduledStep, StepResults
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork, calibrate
from nanovllm_kernels.attention.rounds import SMALLEST_ROUNDS, AttentionRounds, attention_pairs

BLOCK_SIZE, MAX_MODEL_LEN = 16, 131_072
TARGET_S, PROMPT_STEP_S = 0.025, 0.05
PADDED = tuple(mixed_sizes(8192))
ROUNDS = AttentionRounds(tile_tokens=32, num_tiles=16)
# Largest excess of a step over its limit, as a share: padding, noise and the roofline's knee are not in the model.
MODEL_ERROR = 0.2


def true_seconds(work: StepWork) -> float:
    """An H200 and a model of 8B parameters: reading weights or multiplying, then attention, then fixed costs."""
    products = max(4.0e-3, 20e-6 * work.num_tokens)
    return products + 3.1e-8 * work.decode_context + 9e-10 * work.prompt_pairs + 0.4e-3


@dataclass
class Engine:
    """A scheduler and a device that runs one step after another, on a clock of its own."""

    seed: int
    target_s: float | None = TARGET_S
    depth: int = 2
    max_num_seqs: int = 64
    rounds: AttentionRounds = ROUNDS
    noise: float = 0.03
    now: float = 0.0
    device_free: float = 0.0
    in_flight: deque[tuple[ScheduledStep, float]] = field(default_factory=deque)
    first_token_at: dict[int, float] = field(default_factory=dict)
    steps: list[tuple[StepWork, float]] = field(default_factory=list)
    deepest: int = 0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        cache = CacheManager(60_000, BLOCK_SIZE, prefix_caching=False, prefix_hash="fast", watermark=0.01)
        model = StepTimeModel()
        calibrate(
            model,
            lambda num_tokens, context: true_seconds(
                StepWork(num_tokens, num_tokens == 1, attention_pairs(context, num_tokens) if num_tokens > 1 else 0)
            ),
            8192,
            MAX_MODEL_LEN,
        )
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=self.max_num_seqs,
            limits=StepLimits(8192, self.target_s, PROMPT_STEP_S, PROMPT_STEP_S, self.rounds, PADDED),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[1],
            step_time_model=model,
        )

    def add(self, key: int, num_tokens: int, max_tokens: int = 4) -> None:
        sampling = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
        request = Request(f"r{key}", [2] * num_tokens, sampling, arrival_time=self.now)
        self.scheduler.add(RequestState(key, request))

    def step(self) -> bool:
        """Fill the device, then wait for its oldest step; False when there is nothing to do."""
        while len(self.in_flight) < self.depth and (planned := self.scheduler.schedule()) is not None:
            seconds = true_seconds(planned.work) * self.rng.uniform(1 - self.noise, 1 + self.noise)
            self.device_free = max(self.device_free, self.now) + seconds
            self.in_flight.append((planned, self.device_free))
            self.steps.append((planned.work, seconds))
        self.deepest = max(self.deepest, len(self.in_flight))
        if not self.in_flight:
            return False
        planned, self.now = self.in_flight.popleft()
        self.scheduler.observe(planned, self.steps[len(self.steps) - len(self.in_flight) - 1][1])
        count = int(planned.plan.scheduled.samples.sum())
        outputs = self.scheduler.complete(planned, StepResults(np.full(count, 7, np.int32), ()))
        for key, _ in outputs.starts:
            self.first_token_at[key] = self.now
        return True

    def excess(self) -> float:
        """The largest share by which a step of several tokens of prompts exceeded its limit."""
        worst = 0.0
        for work, seconds in self.steps:
            has_decodes = work.decode_context > 0
            limit = TARGET_S if has_decodes else PROMPT_STEP_S
            alone = true_seconds(StepWork(work.num_tokens, work.decode_context))
            # The least that prompts get, one block, comes on top of decodes that take the whole limit.
            if work.prompt_pairs and alone < limit / 2:
                worst = max(worst, seconds / limit - 1)
        return worst


@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_keep_every_step_within_its_limit_and_all_finish(seed):
    engine = Engine(seed, depth=random.Random(seed).choice([1, 2]), rounds=ROUNDS if seed % 3 else SMALLEST_ROUNDS)
    rng = engine.rng
    arrivals = deque(sorted(rng.uniform(0, 20) for _ in range(120)))
    while engine.step() or arrivals:
        if arrivals and not engine.in_flight:
            engine.now = max(engine.now, arrivals[0])
        while arrivals and arrivals[0] <= engine.now:
            arrivals.popleft()
            length = rng.choice([5, 100, 1000, 8000, 30_000])
            engine.add(len(engine.first_token_at) * 1000 + len(arrivals), length, rng.choice([1, 20, 200]))
    assert len(engine.first_token_at) == 120
    assert engine.excess() <= MODEL_ERROR
    assert engine.scheduler.step_time_model.mean_error < 0.15
    assert engine.deepest <= engine.depth


def test_a_short_prompt_waits_for_the_steps_in_flight_and_its_own_beside_a_long_one():
    engine = Engine(0)
    engine.add(0, 100_000, 1)
    waits, key = [], 0
    while 0 not in engine.first_token_at:
        if engine.now > 0.3 * key:
            key += 1
            engine.add(key, 100, 1)
            arrived = engine.now
        engine.step()
        if key in engine.first_token_at:
            waits.append(engine.first_token_at[key] - arrived)
    assert len(waits) > 15
    assert max(waits) <= 3 * PROMPT_STEP_S * (1 + MODEL_ERROR)


def test_short_prompts_now_and_then_hardly_delay_a_long_one():
    times = []
    for num_short in (0, 20):
        engine = Engine(1, noise=0)
        engine.add(0, 100_000, 1)
        for key in range(1, num_short + 1):
            engine.add(key, 100, 1)
        while 0 not in engine.first_token_at:
            engine.step()
        times.append(engine.first_token_at[0])
    assert times[1] <= 1.05 * times[0]


def test_endless_short_prompts_leave_a_long_one_its_share():
    engine = Engine(2, noise=0)
    engine.add(0, 50_000, 1)
    key, alone = 0, Engine(2, noise=0)
    alone.add(0, 50_000, 1)
    while alone.step():
        pass
    # Twice as much as the device can do.
    while 0 not in engine.first_token_at:
        for _ in range(4):
            key += 1
            engine.add(key, 1000, 1)
        assert engine.step()
    assert engine.now <= 5 * alone.now


def test_priorities_rule_between_classes():
    engine = Engine(3)
    engine.add(0, 20_000, 1)
    engine.step()
    sampling = SamplingParams(ignore_eos=True, max_tokens=1)
    urgent = Request("urgent", [2] * 60_000, sampling, priority=-1, arrival_time=engine.now)
    engine.scheduler.add(RequestState(1, urgent))
    while engine.step():
        pass
    assert engine.first_token_at[1] < engine.first_token_at[0]


def test_an_aborted_long_prompt_computes_for_two_more_steps_at_most():
    engine = Engine(4)
    engine.add(0, 100_000, 1)
    for _ in range(5):
        engine.step()
    before = len(engine.steps)
    engine.scheduler.abort(0)
    while engine.step():
        pass
    assert len(engine.steps) == before
    assert engine.scheduler.cache.pool.num_free == engine.scheduler.cache.pool.num_blocks


def test_decodes_that_take_the_whole_target_leave_prompts_a_block():
    engine = Engine(5, target_s=0.001)
    engine.add(0, 50, 1000)
    engine.step()
    engine.add(1, 100, 1)
    counts = []
    while 1 not in engine.first_token_at:
        engine.step()
        counts.extend(planned.plan.shape.num_tokens for planned, _ in engine.in_flight)
    assert max(counts) == 1 + BLOCK_SIZE


def test_without_a_target_a_slow_decode_step_raises_the_limit():
    limits = StepLimits(8192, None, 0.06, 0.05)
    assert limits.time_limit_s(3, 0.002) == 0.05
    assert limits.time_limit_s(3, 0.03) == pytest.approx(0.12)
    assert limits.time_limit_s(0, 0.03) == 0.06
    assert StepLimits(8192, 0.025, 0.06, 0.05).time_limit_s(3, 0.03) == 0.025
