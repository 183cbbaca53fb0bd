"""The loop's order of things, and how it ends."""

import asyncio
import threading

import pytest

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_core.engine.async_engine import build_loop
from nanovllm_core.engine.loop import EngineLoop
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

        def wrapped(*args):
            done.append(what)
            return method(*args)

        monkeypatch.setattr(cls, name, wrapped)

    recorded(Runner, "launch", "launch")
    # Posted with all outputs.
    recorded(EngineLoop, "_stats", "post")
    return done


@pytest.mark.parametrize(
    ("computes_later", "depth", "order"),
    [
        # On a CPU whoever waits would wait for another step, too.
        (False, None, "launch post launch post launch post launch post launch post launch post"),
        # That the last token will be the last is known before the token is.
        (True, 2, "launch launch launch post launch post launch post launch post post post"),
        (True, 1, "launch launch post launch post launch post launch post launch post post"),
    ],
)
async def test_a_device_has_its_next_step_before_outputs_go_out(computes_later, depth, order, toy_spec, oracle, events):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32, depth=depth))
    engine._loop._runner.computes_later = computes_later
    async with asyncio.timeout(10):
        while "post" not in events:
            await asyncio.sleep(0.001)
    events.clear()
    tokens = [token async for output in engine.generate(request()) for token in output.new_token_ids]
    await engine.stop()
    assert tokens == oracle(PROMPT, OUTPUTS)
    # Then the loop says that it is at rest, if it was not stopped before.
    assert " ".join(events[: 2 * OUTPUTS]) == order


async def test_what_comes_while_a_step_is_launched_is_in_the_next(toy_spec, monkeypatch):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32, depth=2))
    loop._runner.computes_later = True
    first, second = request(), request()
    first.key, second.key = 1, 2
    launch = loop._runner.launch
    begun: list[list[int]] = []

    def launching(plan):
        if not begun:
            loop.submit(second)
        begun.append([len(row.token_ids) for row in plan.new_rows])
        return launch(plan)

    def emit(outputs, _):
        if len(begun) > 1:
            loop.stop()

    monkeypatch.setattr(loop._runner, "launch", launching)
    loop.submit(first)
    async with asyncio.timeout(10):
        await loop.run(emit)
    assert begun[:2] == [[len(PROMPT)]] * 2


async def test_the_thread_ends_with_the_loop_whatever_ended_that(toy_spec):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))

    def emit(outputs, _):
        if outputs.tokens:
            raise RuntimeError("nobody takes this")

    asked = request()
    asked.key = 1
    loop.submit(asked)
    with pytest.raises(RuntimeError, match="nobody takes this"):
        await loop.run(emit)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nanovllm-engine")]
