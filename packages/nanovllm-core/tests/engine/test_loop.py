"""The order in which the loop plans, launches and posts, and how it stops."""

import asyncio
import threading
import time

import pytest
import torch

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_core.engine.build import build_loop
from nanovllm_core.engine.loop import EngineLoop
from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.runner import Runner

PROMPT = [5, 6, 7]
OUTPUTS = 6


def request() -> Request:
    return Request("r", list(PROMPT), SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True))


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What the loop's thread does, in order: launches steps, and posts their outputs."""
    done: list[str] = []

    def recorded(cls, name, what):
        method = getattr(cls, name)

        def wrapped(*args, **kwargs):
            done.append(what)
            return method(*args, **kwargs)

        monkeypatch.setattr(cls, name, wrapped)

    recorded(Runner, "launch", "launch")
    recorded(EngineLoop, "_post", "post")
    return done


@pytest.mark.parametrize(
    ("is_asynchronous", "depth", "order"),
    [
        # On a CPU whoever waits would wait for another step, too.
        (False, None, "launch post launch post launch post launch post launch post launch post"),
        # That the last token will be the last is known before the token is.
        (True, 2, "launch launch launch post launch post launch post launch post post post"),
        (True, 1, "launch launch post launch post launch post launch post launch post post"),
    ],
)
async def test_next_step_is_launched_before_outputs_are_posted(is_asynchronous, depth, order, toy_spec, oracle, events):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32, depth=depth))
    engine._loop._runner.is_asynchronous = is_asynchronous
    async with asyncio.timeout(10):
        while "post" not in events:
            await asyncio.sleep(0.001)
    events.clear()
    tokens = [token async for output in engine.generate(request()) for token in output.new_token_ids]
    await engine.stop()
    assert tokens == oracle(PROMPT, OUTPUTS)
    # Then the loop says that it is at rest, if it was not stopped before.
    assert " ".join(events[: 2 * OUTPUTS]) == order


async def test_request_that_arrives_during_a_launch_is_in_the_next_step(toy_spec, monkeypatch):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32, depth=2))
    loop._runner.is_asynchronous = True
    first, second = request(), request()
    launch = loop._runner.launch
    begun: list[list[int]] = []

    def launching(plan):
        if not begun:
            loop.submit(2, second)
        begun.append([len(row.token_ids) for row in plan.new_rows])
        return launch(plan)

    def emit(outputs, _):
        if len(begun) > 1:
            loop.stop()

    monkeypatch.setattr(loop._runner, "launch", launching)
    loop.submit(1, first)
    async with asyncio.timeout(10):
        await loop.run(emit)
    assert begun[:2] == [[len(PROMPT)]] * 2


async def test_the_thread_ends_with_the_loop_whatever_ended_that(toy_spec):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))

    def emit(outputs, _):
        if outputs.tokens:
            raise RuntimeError("nobody takes this")

    loop.submit(1, request())
    with pytest.raises(RuntimeError, match="nobody takes this"):
        await loop.run(emit)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nanovllm-engine")]


class SlowEvent:
    """An event of a device whose steps take 50 ms each, one after another."""

    device_free = 0.0

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.due = 0.0

    def record(self, stream) -> None:
        SlowEvent.device_free = self.due = max(SlowEvent.device_free, time.monotonic()) + self._seconds

    def query(self) -> bool:
        return time.monotonic() >= self.due

    def synchronize(self) -> None:
        time.sleep(max(self.due - time.monotonic(), 0))

    def elapsed_time(self, end: "SlowEvent") -> float:
        return (end.due - self.due) * 1e3


class SlowHostCopyRing:
    """Host copy buffers of a device whose steps take 50 ms."""

    def __init__(self, size: int):
        self._size = size
        self.ends: list[SlowEvent] = []

    def next_slot(self) -> HostCopySlot:
        tokens = torch.zeros(self._size, dtype=torch.int32)
        self.ends.append(SlowEvent(0.05))
        return HostCopySlot(tokens, tokens.numpy(), SlowEvent(0.0), self.ends[-1], None)


@pytest.fixture
async def slow_loop(toy_spec) -> EngineLoop:
    config = EngineConfig(device="cpu", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32, depth=2)
    loop = await build_loop(toy_spec(), config)
    loop._runner.is_asynchronous = True
    loop._runner._host_copies = SlowHostCopyRing(4)
    return loop


async def test_no_more_steps_than_depth_are_in_flight_even_if_they_sample_nothing(slow_loop, monkeypatch):
    launch, in_flight = slow_loop._runner.launch, []

    def launching(plan):
        in_flight.append(1 + sum(not end.query() for end in slow_loop._runner._host_copies.ends))
        return launch(plan)

    monkeypatch.setattr(slow_loop._runner, "launch", launching)
    long = Request("long", [3] * 250, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    slow_loop.submit(1, long)

    def emit(outputs, _):
        if outputs.finishes:
            slow_loop.stop()

    async with asyncio.timeout(20):
        await slow_loop.run(emit)
    assert len(in_flight) >= 250 // 32
    assert max(in_flight) == 2


async def test_a_request_that_comes_while_a_long_step_runs_is_in_the_step_behind_it(slow_loop, monkeypatch):
    runner, launched = slow_loop._runner, []
    monkeypatch.setattr(
        slow_loop._scheduler.step_time_model, "predict", lambda work: 0.05 if work.prompt_pairs else 0.0
    )
    launch = runner.launch

    def launching(plan):
        launched.append((time.monotonic(), [row.num_prompt_tokens for row in plan.new_rows]))
        return launch(plan)

    monkeypatch.setattr(runner, "launch", launching)
    requests = [
        Request(name, [3] * length, SamplingParams(max_tokens=1)) for name, length in (("long", 250), ("short", 5))
    ]
    slow_loop.submit(1, requests[0])
    running = asyncio.create_task(slow_loop.run(lambda outputs, stats: None))
    async with asyncio.timeout(20):
        while len(launched) < 3:
            await asyncio.sleep(0.001)
        slow_loop.submit(2, requests[1])
        while not (with_short := [index for index, (_, lengths) in enumerate(launched) if lengths == [5]]):
            await asyncio.sleep(0.001)
    slow_loop.stop()
    await running
    # Planned at once, it would have been launched 50 ms before the step ahead of it ends.
    (index,) = with_short
    assert runner._host_copies.ends[index - 1].due - launched[index][0] < 0.03


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
        before = len(launched)
        while slow_loop._scheduler.has_requests:
            await asyncio.sleep(0.001)
    slow_loop.stop()
    await running
    assert len(launched) - before <= 2
    assert slow_loop._scheduler.cache.pool.num_free == 64


async def test_outputs_of_a_finished_step_come_out_although_the_next_launch_fails(slow_loop, monkeypatch):
    launch, launched = slow_loop._runner.launch, []

    def failing(plan):
        launched.append(plan)
        if len(launched) == 3:
            raise RuntimeError("this launch fails")
        return launch(plan)

    monkeypatch.setattr(slow_loop._runner, "launch", failing)
    tokens = []
    slow_loop.submit(1, request())
    with pytest.raises(RuntimeError, match="this launch fails"):
        await slow_loop.run(lambda outputs, _: tokens.extend(outputs.tokens))
    assert len(tokens) == 1


async def test_stats_count_waiting_and_running_requests_during_a_long_step(toy_spec, monkeypatch):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32, max_num_seqs=1))
    launch, computing, go_on = loop._runner.launch, threading.Event(), threading.Event()

    def launching(plan):
        computing.set()
        go_on.wait(20)
        return launch(plan)

    monkeypatch.setattr(loop._runner, "launch", launching)
    told = []

    async def tell_within(seconds: float, running: int, waiting: int) -> None:
        async with asyncio.timeout(seconds):
            while not told or (told[-1].num_requests_running, told[-1].num_requests_waiting) != (running, waiting):
                await asyncio.sleep(0.005)

    serving = asyncio.create_task(loop.run(lambda _, stats: told.append(stats) if stats is not None else None))
    try:
        loop.submit(0, request())
        await asyncio.to_thread(computing.wait, 20)
        await tell_within(0.2, running=1, waiting=0)
        loop.submit(1, request())
        loop.submit(2, request())
        await tell_within(0.2, running=1, waiting=2)
        loop.abort(1)
        await tell_within(0.2, running=1, waiting=1)
        # The step still computes the first, which runs until its end.
        loop.abort(0)
        loop.abort(2)
        await tell_within(0.2, running=1, waiting=0)
        go_on.set()
        await tell_within(0.2, running=0, waiting=0)
    finally:
        go_on.set()
        loop.stop()
        await serving
    assert loop._scheduler.counters.num_steps == 1


async def test_an_engine_at_rest_says_nothing(toy_spec):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    told = []
    serving = asyncio.create_task(loop.run(lambda _, stats: told.append(stats)))
    async with asyncio.timeout(10):
        while not told:
            await asyncio.sleep(0.005)
    said = len(told)
    await asyncio.sleep(0.35)
    assert len(told) == said
    loop.stop()
    await serving


@pytest.mark.parametrize("fails", [False, True])
async def test_spinning_is_controlled_while_the_engine_is_there(fails, toy_spec, monkeypatch):
    done = []

    class Spins:
        def __init__(self, *, is_on: bool):
            done.append(is_on)

        def close(self) -> None:
            done.append("close")

    monkeypatch.setattr("nanovllm_core.engine.build.SpinControl", Spins)
    monkeypatch.setattr("nanovllm_core.engine.build.can_limit", lambda: True)
    if fails:
        monkeypatch.setattr("nanovllm_core.engine.build.calibrate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    else:
        engine = await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
        assert [token async for output in engine.generate(request()) for token in output.new_token_ids]
        assert done == [True]
        await engine.stop()
    assert done == [True, "close"]
