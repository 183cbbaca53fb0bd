import asyncio
import threading

import pytest
from loops import hold_launches, make_request

from nanovllm_core import AsyncEngine, EngineConfig, EngineDeadError, GrammarError, GrammarSpec
from nanovllm_core.engine.build import build_loop


async def test_the_engine_thread_ends_when_emitting_fails(toy_spec):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))

    def emit(outputs, _):
        if outputs.tokens:
            raise RuntimeError("emitting fails")

    loop.submit(1, make_request())
    with pytest.raises(RuntimeError, match="emitting fails"):
        await loop.run(emit)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nanovllm-engine")]


async def test_a_second_cancellation_does_not_keep_the_grammar_compiler_open(toy_spec, monkeypatch):
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    has_launched, may_compute = hold_launches(loop._runner, monkeypatch)
    loop.submit(1, make_request())
    serving = asyncio.create_task(loop.run(lambda outputs, stats: None))
    try:
        assert await asyncio.to_thread(has_launched.wait, 30)
        serving.cancel()
        # The first cancellation ends at the wait for the step.
        await asyncio.sleep(0)
        assert not serving.done()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        with pytest.raises(GrammarError, match="can't be compiled now"):
            await loop.compile_grammar(GrammarSpec("regex", "a"))
    finally:
        may_compute.set()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("hangs_in_launch", [False, True])
async def test_an_engine_whose_step_hangs_fails(hangs_in_launch, depth, toy_spec, monkeypatch):
    monkeypatch.setattr("nanovllm_core.engine.loop.STEP_TIMEOUT_S", 0.3)
    monkeypatch.setattr("nanovllm_core.engine.loop_end.FAILED_RANK_TIMEOUT_S", 0.0)
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32, depth=depth))
    loop._runner.is_asynchronous = not hangs_in_launch
    launch, may_compute = loop._runner.launch, threading.Event()

    def hanging_launch(plan):
        if hangs_in_launch:
            may_compute.wait()
        handle = launch(plan)
        monkeypatch.setattr(type(handle), "is_finished", property(lambda _: may_compute.is_set()))
        monkeypatch.setattr(type(handle), "wait", lambda _: may_compute.wait())
        return handle

    monkeypatch.setattr(loop._runner, "launch", hanging_launch)
    loop.submit(1, make_request())
    try:
        with pytest.raises(EngineDeadError, match=r"a step has not ended within 0\.3 s"):
            await loop.run(lambda outputs, stats: None)
    finally:
        may_compute.set()
        loop._executor.shutdown()


async def test_a_cancelled_stop_ends_at_once_and_the_engine_can_be_stopped_again(toy_spec, monkeypatch):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    has_launched, may_compute = hold_launches(engine._loop._runner, monkeypatch)
    stream = engine.generate(make_request())
    next_output = asyncio.ensure_future(anext(stream))
    try:
        assert await asyncio.to_thread(has_launched.wait, 30)
        stop_task = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        stop_task.cancel()
        done, _ = await asyncio.wait((stop_task,), timeout=20)
        assert done
    finally:
        may_compute.set()
    await engine.stop()
    assert engine.death_reason == "the engine was stopped"
    await asyncio.wait((next_output,))
    await stream.aclose()
