import asyncio
import time

import pytest
import torch
from loops import NUM_OUTPUTS, PROMPT, hold_launches, make_request

from nanovllm_core import (
    AsyncEngine,
    EngineConfig,
    Request,
    SamplingParams,
)
from nanovllm_core.engine import wire
from nanovllm_core.engine.build import build_loop
from nanovllm_core.engine.loop import EngineLoop
from nanovllm_core.engine.report import collect_stats
from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.runner import Runner
from nanovllm_core.outputs import StepOutputs
from nanovllm_core.scheduling.draft_times import DraftLimits, DraftTimes
from nanovllm_core.scheduling.drafting import DraftPlanner


@pytest.fixture
def events(monkeypatch) -> list[str]:
    calls: list[str] = []

    def record_calls(cls, method_name, event):
        method = getattr(cls, method_name)

        def wrapped(*args, **kwargs):
            calls.append(event)
            return method(*args, **kwargs)

        monkeypatch.setattr(cls, method_name, wrapped)

    record_calls(Runner, "launch", "launch")
    record_calls(EngineLoop, "_post", "post")
    return calls


@pytest.mark.parametrize(
    ("is_asynchronous", "max_steps_in_flight", "order"),
    [
        # On a CPU, `launch` computes the step, so outputs are posted before the next launch.
        (False, None, "launch post launch post launch post launch post launch post launch post"),
        (True, 2, "launch launch launch post launch post launch post launch post post post"),
        (True, 1, "launch launch post launch post launch post launch post launch post post"),
    ],
)
async def test_next_step_is_launched_before_outputs_are_posted(
    is_asynchronous, max_steps_in_flight, order, toy_spec, oracle, events
):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32, depth=max_steps_in_flight))
    engine._loop._runner.is_asynchronous = is_asynchronous
    async with asyncio.timeout(60):
        while "post" not in events:
            await asyncio.sleep(0.001)
    events.clear()
    tokens = [token async for output in engine.generate(make_request()) for token in output.new_token_ids]
    await engine.stop()
    assert tokens == oracle(PROMPT, NUM_OUTPUTS)
    # After these events, the loop may also post that it is idle.
    assert " ".join(events[: 2 * NUM_OUTPUTS]) == order


async def test_request_that_arrives_during_a_launch_is_in_the_next_step(toy_spec, monkeypatch):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32, depth=2))
    loop._runner.is_asynchronous = True
    first, second = make_request(), make_request()
    launch = loop._runner.launch
    prompt_lengths_by_step: list[list[int]] = []

    def launch_spy(plan):
        if not prompt_lengths_by_step:
            loop.submit(2, second)
        prompt_lengths_by_step.append([len(row.token_ids) for row in plan.new_rows])
        return launch(plan)

    def emit(outputs, _):
        if len(prompt_lengths_by_step) > 1:
            loop.stop()

    monkeypatch.setattr(loop._runner, "launch", launch_spy)
    loop.submit(1, first)
    async with asyncio.timeout(60):
        await loop.run(emit)
    assert prompt_lengths_by_step[:2] == [[len(PROMPT)]] * 2


class SlowEvent:
    """An event of a device that works in order. seconds: duration of the work since the previous event."""

    device_idle_at = 0.0

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.finish_time = 0.0

    def record(self, stream) -> None:
        SlowEvent.device_idle_at = self.finish_time = max(SlowEvent.device_idle_at, time.monotonic()) + self._seconds

    def query(self) -> bool:
        return time.monotonic() >= self.finish_time

    def synchronize(self) -> None:
        time.sleep(max(self.finish_time - time.monotonic(), 0))

    def elapsed_time(self, end: "SlowEvent") -> float:
        return (end.finish_time - self.finish_time) * 1e3


class SlowHostCopyRing:
    def __init__(self, size: int):
        self._size = size
        self.end_events: list[SlowEvent] = []

    def next_slot(self) -> HostCopySlot:
        tokens = torch.zeros(self._size, dtype=torch.int32)
        self.end_events.append(SlowEvent(0.05))
        return HostCopySlot(tokens, tokens.numpy(), SlowEvent(0.0), self.end_events[-1], None)


@pytest.fixture
async def slow_loop(toy_spec) -> EngineLoop:
    config = EngineConfig(device="cpu", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32, depth=2)
    loop = await build_loop(toy_spec(), config)
    loop._runner.is_asynchronous = True
    loop._runner._host_copies = SlowHostCopyRing(4)
    return loop


async def test_no_more_steps_than_depth_are_in_flight_even_if_they_sample_nothing(slow_loop, monkeypatch):
    launch, nums_in_flight = slow_loop._runner.launch, []

    def launch_spy(plan):
        nums_in_flight.append(1 + sum(not end.query() for end in slow_loop._runner._host_copies.end_events))
        return launch(plan)

    monkeypatch.setattr(slow_loop._runner, "launch", launch_spy)
    long = Request("long", [3] * 250, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    slow_loop.submit(1, long)

    def emit(outputs, _):
        if outputs.finishes:
            slow_loop.stop()

    async with asyncio.timeout(20):
        await slow_loop.run(emit)
    assert len(nums_in_flight) >= 250 // 32
    assert max(nums_in_flight) == 2


async def test_a_request_that_arrives_during_a_long_step_is_in_the_next_step(slow_loop, monkeypatch):
    runner, launched = slow_loop._runner, []
    monkeypatch.setattr(
        slow_loop._scheduler.step_time_model, "predict", lambda work: 0.05 if work.prompt_pairs else 0.0
    )
    launch = runner.launch

    def launch_spy(plan):
        launched.append((time.monotonic(), [row.num_prompt_tokens for row in plan.new_rows]))
        return launch(plan)

    monkeypatch.setattr(runner, "launch", launch_spy)
    requests = [
        Request(name, [3] * length, SamplingParams(max_tokens=1)) for name, length in (("long", 250), ("short", 5))
    ]
    slow_loop.submit(1, requests[0])
    running = asyncio.create_task(slow_loop.run(lambda outputs, stats: None))
    async with asyncio.timeout(20):
        while len(launched) < 3:
            await asyncio.sleep(0.001)
        slow_loop.submit(2, requests[1])
        while not (short_indices := [index for index, (_, lengths) in enumerate(launched) if lengths == [5]]):
            await asyncio.sleep(0.001)
    slow_loop.stop()
    await running
    # A step that is planned too early would be launched 50 ms before the preceding step ends.
    (index,) = short_indices
    assert runner._host_copies.end_events[index - 1].finish_time - launched[index][0] < 0.03


async def test_an_abort_of_a_lone_long_prompt_takes_effect_within_two_steps(slow_loop, monkeypatch):
    launch, launched = slow_loop._runner.launch, []
    monkeypatch.setattr(slow_loop._runner, "launch", lambda plan: launched.append(plan) or launch(plan))
    long = Request("long", [3] * 250, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    slow_loop.submit(1, long)
    running = asyncio.create_task(slow_loop.run(lambda outputs, stats: None))
    async with asyncio.timeout(20):
        while len(launched) < 3:
            await asyncio.sleep(0.001)
        slow_loop.abort(1)
        num_launched_before = len(launched)
        while slow_loop._scheduler.has_requests:
            await asyncio.sleep(0.001)
    slow_loop.stop()
    await running
    assert len(launched) - num_launched_before <= 2
    assert slow_loop._scheduler.caches[0].pool.num_free == 64


async def test_outputs_of_a_finished_step_are_emitted_although_the_next_launch_fails(slow_loop, monkeypatch):
    launch, launched = slow_loop._runner.launch, []

    def fail_third_launch(plan):
        launched.append(plan)
        if len(launched) == 3:
            raise RuntimeError("this launch fails")
        return launch(plan)

    monkeypatch.setattr(slow_loop._runner, "launch", fail_third_launch)
    tokens = []
    slow_loop.submit(1, make_request())
    with pytest.raises(RuntimeError, match="this launch fails"):
        await slow_loop.run(lambda outputs, _: tokens.extend(outputs.tokens))
    assert len(tokens) == 1


async def test_stats_count_waiting_and_running_requests_during_a_long_step(toy_spec, monkeypatch):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32, max_num_seqs=1))
    has_launched, may_compute = hold_launches(loop._runner, monkeypatch)
    emitted_stats = []

    def counts(stats) -> tuple[int, int]:
        return stats.num_requests_running, stats.num_requests_waiting

    async def wait_for_stats(running: int, waiting: int) -> None:
        async with asyncio.timeout(30):
            while not emitted_stats or counts(emitted_stats[-1]) != (running, waiting):
                await asyncio.sleep(0.005)

    serving = asyncio.create_task(loop.run(lambda _, stats: emitted_stats.append(stats) if stats is not None else None))
    try:
        loop.submit(0, make_request())
        assert await asyncio.to_thread(has_launched.wait, 30)
        await wait_for_stats(running=1, waiting=0)
        loop.submit(1, make_request())
        loop.submit(2, make_request())
        await wait_for_stats(running=1, waiting=2)
        loop.abort(1)
        await wait_for_stats(running=1, waiting=1)
        # The step still computes the first request, which counts as running until the step ends.
        loop.abort(0)
        loop.abort(2)
        await wait_for_stats(running=1, waiting=0)
        may_compute.set()
        await wait_for_stats(running=0, waiting=0)
    finally:
        may_compute.set()
        loop.stop()
        await serving
    assert loop._scheduler.counters.num_steps == 1


async def test_an_idle_engine_emits_nothing(toy_spec):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    emitted_stats = []
    serving = asyncio.create_task(loop.run(lambda _, stats: emitted_stats.append(stats)))
    async with asyncio.timeout(60):
        while not emitted_stats:
            await asyncio.sleep(0.005)
    num_emitted = len(emitted_stats)
    await asyncio.sleep(0.35)
    assert len(emitted_stats) == num_emitted
    loop.stop()
    await serving


async def test_stats_have_the_totals_of_drafts_by_position(toy_spec):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    scheduler = loop._scheduler
    stats = collect_stats(scheduler, loop._runner, None)
    assert (stats.verified_drafts_by_position, stats.accepted_drafts_by_position) == ((), ())
    scheduler.draft_planner = DraftPlanner(scheduler.rows, DraftLimits(3, 64), scheduler.step_time_model, DraftTimes())
    scheduler.draft_planner.num_verified[:], scheduler.draft_planner.num_accepted[:] = (9, 4, 2), (6, 1, 0)
    payload = wire.encode(wire.Step(StepOutputs(), collect_stats(scheduler, loop._runner, None)))
    message = wire.decode_to_client(payload)
    assert isinstance(message, wire.Step)
    assert message.stats is not None
    assert (message.stats.verified_drafts_by_position, message.stats.accepted_drafts_by_position) == (
        (9, 4, 2),
        (6, 1, 0),
    )
    loop.stop()
    await loop.run(lambda _, stats: None)


@pytest.mark.parametrize("fails", [False, True])
async def test_spinning_is_controlled_until_the_engine_stops_or_fails_to_start(fails, toy_spec, monkeypatch):
    calls = []

    class FakeSpinControl:
        def __init__(self, *, is_on: bool):
            calls.append(is_on)

        def close(self) -> None:
            calls.append("close")

    monkeypatch.setattr("nanovllm_core.engine.build.SpinControl", FakeSpinControl)
    monkeypatch.setattr("nanovllm_core.engine.build.can_shorten_spins", lambda: True)
    if fails:
        monkeypatch.setattr("nanovllm_core.engine.build.calibrate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    else:
        engine = await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
        assert [token async for output in engine.generate(make_request()) for token in output.new_token_ids]
        assert calls == [True]
        await engine.stop()
    assert calls == [True, "close"]
