"""The client of an engine in another process."""

import asyncio
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
import toy_model
import zmq
import zmq.asyncio

from nanovllm_core import (
    ConfigError,
    EngineAddress,
    EngineClient,
    EngineConfig,
    EngineDeadError,
    EngineInfo,
    EngineStats,
    GrammarSpec,
    Request,
    SamplingParams,
)
from nanovllm_core.engine import wire
from nanovllm_core.engine.server import EngineServer

CONFIG = EngineConfig(device="cpu", num_blocks=64, max_num_seqs=8)


def greedy(name: str, prompt: list[int], count: int, **sampling) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **sampling))


async def collect(engine: EngineClient, request: Request) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


def pid_of(engine: EngineClient) -> int:
    return engine._owned_process.pid


async def test_answers_equal_those_of_the_oracle(toy_spec, oracle):
    engine = await EngineClient.launch(toy_spec(), CONFIG)
    try:
        assert engine.info.num_blocks == 64
        prompts = [[index, 2, 3] for index in range(6)]
        found = await asyncio.gather(*(collect(engine, greedy(f"r{i}", p, 20)) for i, p in enumerate(prompts)))
        assert found == [oracle(prompt, 20) for prompt in prompts]
        request = greedy("p", [1, 2], 3, logprobs=2)
        assert [len(e.top) async for out in engine.generate(request) for e in out.logprobs] == [2, 2, 2]

        request = greedy("q", [1, 2, 3], 3, prompt_logprobs=2)
        prompt_logprobs = [output.prompt_logprobs async for output in engine.generate(request)]
        assert [len(each.top) for each in prompt_logprobs[0]] == [2, 2]
        assert not any(prompt_logprobs[1:])

        stream = engine.generate(greedy("long", [1, 2, 3], 200))
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(60):
            while engine.stats.num_requests_running or engine.stats.num_free_blocks < 64:
                await asyncio.sleep(0.01)
        assert engine.stats.generation_tokens >= 120
    finally:
        await engine.stop()
    assert engine.death_reason == "the engine was stopped"


async def test_killed_engine_fails_open_requests(toy_spec):
    engine = await EngineClient.launch(toy_spec("long"), replace(CONFIG, num_blocks=toy_model.LONG_CONTEXT // 16))
    stream = engine.generate(greedy("a", [1], toy_model.LONG_CONTEXT - 2))
    await anext(stream)
    os.kill(pid_of(engine), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"died \(exit code -9\)"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await collect(engine, greedy("b", [1], 1))
    await engine.stop()


async def test_a_failing_step_fails_requests_with_the_reason(toy_spec):
    engine = await EngineClient.launch(toy_spec("failing"), CONFIG)
    with pytest.raises(EngineDeadError, match="a poisoned token"):
        await collect(engine, greedy("a", [96], 2))
    assert "a poisoned token" in engine.death_reason
    # Several callers may stop the engine. A second close of a descriptor could close another file.
    await asyncio.gather(engine.stop(), engine.stop())
    await engine.stop()


async def test_an_error_while_building_the_model_reaches_the_client(toy_spec):
    with pytest.raises(ConfigError, match="^this model can't be built$"):
        await EngineClient.launch(toy_spec("refusing"), CONFIG)


async def test_an_id_can_be_used_again_as_soon_as_its_stream_is_closed(toy_spec, oracle):
    engine = await EngineClient.launch(toy_spec(), CONFIG)
    try:
        for _ in range(20):
            stream = engine.generate(greedy("same", [1, 2, 3], 100))
            await anext(stream)
            await stream.aclose()
        assert await collect(engine, greedy("same", [4, 5], 10)) == oracle([4, 5], 10)
    finally:
        await engine.stop()


INFO = EngineInfo(
    model="m",
    device="cpu",
    dtype="float32",
    vocab_size=97,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    block_size=16,
    num_blocks=64,
    kv_cache_dtype="float32",
    kv_cache_bytes=1,
    prefix_caching=True,
    attention_backend="torch",
    supports_grammars=True,
)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"no message", "DecodeError|ValidationError"),
        # An answer to a message that the client has not sent.
        (wire.encode(wire.Compiled(12345, None)), "KeyError: 12345"),
    ],
)
async def test_an_unreadable_message_fails_all_requests(tmp_path, caplog, message, reason):
    lifeline, write_end = multiprocessing.Pipe(duplex=False)
    endpoint = f"ipc://{tmp_path}/engine"
    with lifeline, write_end, zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as engine:
        engine.bind(endpoint)
        connecting = asyncio.create_task(EngineClient.connect(EngineAddress(endpoint, lifeline)))
        identity, _ = await engine.recv_multipart()
        await engine.send_multipart([identity, wire.encode(wire.Ready(INFO, 0))])
        client = await connecting
        reading = asyncio.create_task(collect(client, greedy("a", [1], 5)))
        compiling = asyncio.create_task(client.compile_grammar(GrammarSpec("regex", "a")))
        for _ in range(2):
            await engine.recv_multipart()
        await engine.send_multipart([identity, message])
        async with asyncio.timeout(60):
            for waiting in (reading, compiling):
                with pytest.raises(EngineDeadError, match=f"messages can't be read: ({reason})"):
                    await waiting
        assert client.death_reason is not None
        assert "engine client failed" in caplog.text
        with pytest.raises(EngineDeadError):
            await collect(client, greedy("b", [1], 1))
        await client.stop()


class CompilingLoop:
    """An engine's loop whose compilations end only by cancellation."""

    info, emitted_stats = INFO, EngineStats()

    def __init__(self):
        self.has_stopped, self.has_begun, self.is_cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self, emit):
        await self.has_stopped.wait()

    def stop(self):
        self.has_stopped.set()

    async def compile_grammar(self, spec: GrammarSpec):
        self.has_begun.set()
        try:
            await self.has_stopped.wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise


async def test_a_cancelled_call_cancels_its_compilation_in_the_engine(tmp_path):
    lifeline, write_end = multiprocessing.Pipe(duplex=False)
    endpoint, loop = f"ipc://{tmp_path}/engine", CompilingLoop()
    with lifeline, write_end, zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        serving = asyncio.create_task(EngineServer(loop, socket).run())
        async with asyncio.timeout(60):
            client = await EngineClient.connect(EngineAddress(endpoint, lifeline))
            compiling = asyncio.create_task(client.compile_grammar(GrammarSpec("regex", "a")))
            await loop.has_begun.wait()
            compiling.cancel()
            await loop.is_cancelled.wait()
            # The engine has answered the call.
            while client._futures:
                await asyncio.sleep(0.01)
            assert client.death_reason is None
            await client.stop()
            loop.stop()
            await serving
