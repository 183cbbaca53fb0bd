"""Several clients of one engine process: each gets its own outputs, and leaves nothing behind."""

import asyncio
import multiprocessing

import numpy as np
from guest import occupy
from toy_model import toy_spec

from nanovllm_core import EngineClient, EngineConfig, Request, SamplingParams
from nanovllm_core.engine import wire
from nanovllm_core.engine.output_buffers import OutputBuffer, OutputBuffers
from nanovllm_core.engine.server import split_by_client
from nanovllm_core.outputs import PromptLogprobs, RequestOutput, StepOutputs, TokenLogprobs

CONFIG = EngineConfig(device="cpu", num_blocks=128, max_num_seqs=8)


def greedy(name: str, prompt: list[int], count: int) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))


async def collect(engine: EngineClient, request: Request) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


async def settled(engine: EngineClient) -> None:
    async with asyncio.timeout(10):
        while engine.stats.num_requests_running or engine.stats.num_free_blocks < 128:
            await asyncio.sleep(0.01)


async def test_each_client_gets_its_own_in_one_message_a_step(oracle, monkeypatch):
    messages: list[wire.Step] = []
    decode = wire.decode_to_client

    def note(payload: bytes) -> wire.ToClient:
        message = decode(payload)
        if isinstance(message, wire.Step):
            messages.append(message)
        return message

    monkeypatch.setattr(wire, "decode_to_client", note)
    owner = await EngineClient.launch(toy_spec(), CONFIG)
    other = await EngineClient.connect(owner.address)
    try:
        assert other.info == owner.info
        prompts = [[index, 2, 3] for index in range(8)]
        # The same ids on both: they never meet.
        found = await asyncio.gather(
            *(collect((owner, other)[i % 2], greedy(f"r{i // 2}", p, 30)) for i, p in enumerate(prompts))
        )
        assert found == [oracle(prompt, 30) for prompt in prompts]
        await settled(owner)
        await settled(other)
        assert owner.stats == other.stats
        filled = [message.outputs for message in messages if message.outputs.keys]
        # Each client heard of each step at most once: 240 outputs came in as many messages at most.
        assert len(filled) <= 2 * owner.stats.num_steps
        assert max(len(outputs.keys) for outputs in filled) == 4
        for outputs in filled:
            assert len(set(outputs.keys)) == len(outputs.keys)
            assert len({key // wire.KEYS_PER_CLIENT for key in outputs.keys}) == 1
    finally:
        await other.stop()
        await owner.stop()
    assert other.death_reason == owner.death_reason == "the engine was stopped"


async def test_a_client_that_leaves_leaves_the_engine_to_the_others(oracle):
    owner = await EngineClient.launch(toy_spec(), CONFIG)
    try:
        for _ in range(3):
            guest = await EngineClient.connect(owner.address)
            assert await collect(guest, greedy("a", [1, 2], 5)) == oracle([1, 2], 5)
            await guest.stop()
        assert await collect(owner, greedy("a", [1, 2], 5)) == oracle([1, 2], 5)
    finally:
        await owner.stop()


async def test_a_killed_client_frees_everything_it_held(oracle):
    owner = await EngineClient.launch(toy_spec(), CONFIG)
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe(duplex=False)
    client = context.Process(target=occupy, args=(owner.address, theirs))
    client.start()
    try:
        assert await asyncio.to_thread(ready.recv) == 3
        client.kill()
        await settled(owner)
        assert await collect(owner, greedy("a", [1, 2], 5)) == oracle([1, 2], 5)
    finally:
        client.kill()
        client.join()
        await owner.stop()


async def test_every_client_hears_that_the_engine_is_gone():
    owner = await EngineClient.launch(toy_spec("failing"), CONFIG)
    other = await EngineClient.connect(owner.address)
    owner._owned_process.kill()
    async with asyncio.timeout(5):
        while owner.death_reason is None or other.death_reason is None:
            await asyncio.sleep(0.01)
    assert owner.death_reason == "the engine process died (exit code -9)"
    assert other.death_reason == "the engine process died"
    await other.stop()
    await owner.stop()


class CountingListener:
    """A listener that counts its wake-ups."""

    def __init__(self) -> None:
        self.num_wakes = 0
        self.failure: str | None = None

    def wake(self) -> None:
        self.num_wakes += 1

    def fail(self, reason: str) -> None:
        self.failure = reason


def test_unread_outputs_are_taken_as_one():
    buffers, listener = OutputBuffers(), CountingListener()
    buffer = OutputBuffer(Request("a", [1, 2, 3], SamplingParams(logprobs=0)), listener)
    buffers.open(9, buffer)
    logprobs = [TokenLogprobs(-0.5, ()), TokenLogprobs(-0.25, ()), TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ())]
    assert buffer.take() is None
    buffers.dispatch(StepOutputs([9], [7], [(9, logprobs[0])], starts=[(9, 2)]))
    assert listener.num_wakes == 1
    # Two tokens of one request, and one of somebody whom nobody listens to.
    buffers.dispatch(StepOutputs([9, 8, 9], [8, 1, 9], [(9, logprobs[1]), (8, logprobs[0]), (9, logprobs[2])]))
    assert buffer.take() == RequestOutput("a", (7, 8, 9), 3, 2, 3, tuple(logprobs[:3]))
    assert buffer.take() is None
    buffers.dispatch(StepOutputs([9], [5], [(9, logprobs[3])], finishes=[(9, "stop", 5)]))
    buffers.dispatch(StepOutputs([9], [6]))
    assert buffer.take() == RequestOutput("a", (5,), 3, 2, 4, (logprobs[3],), "stop", 5)
    assert buffer.take() is None
    assert not buffers.close(9), "its last output had come"
    buffers.fail_all("gone")
    assert listener.failure is None


def test_prompt_logprobs_come_once_with_the_first_token():
    buffers, listener = OutputBuffers(), CountingListener()
    buffer = OutputBuffer(Request("a", [1, 2, 3], SamplingParams(prompt_logprobs=1)), listener)
    buffers.open(9, buffer)
    parts = [
        PromptLogprobs(1, *(np.array(column).tobytes() for column in columns))
        for columns in (
            (np.float32([-0.5]), np.int32([1]), np.int32([[2]]), np.float32([[-0.5]])),
            (np.float32([-3.0]), np.int32([7]), np.int32([[4]]), np.float32([[-0.25]])),
        )
    ]
    for part in parts:
        buffers.dispatch(StepOutputs(prompt_logprobs=[(9, part)]))
    assert (listener.num_wakes, buffer.take()) == (0, None)
    buffers.dispatch(StepOutputs([9], [7]))
    told = buffer.take().prompt_logprobs
    assert [*told] == [(-0.5, 1, ((2, -0.5),)), (-3.0, 7, ((4, -0.25),))]
    assert (len(told), told.num_top) == (2, 1)
    buffers.dispatch(StepOutputs([9], [8]))
    assert buffer.take().prompt_logprobs is None


def test_a_steps_outputs_are_cut_by_client():
    one, two = 5, 2 * wire.KEYS_PER_CLIENT + 5
    logprobs = TokenLogprobs(-0.5, ())
    whole = StepOutputs([one, two, one], [7, 8, 9], [(two, logprobs)], [(one, 16)], [(one, "length", None)])
    assert split_by_client(whole) == {
        0: StepOutputs([one, one], [7, 9], [], [(one, 16)], [(one, "length", None)]),
        2: StepOutputs([two], [8], [(two, logprobs)]),
    }
    assert split_by_client(StepOutputs()) == {}
    # What is told of a prompt may come in a step without a token of its request.
    told = PromptLogprobs(0, bytes(4), bytes(4), b"", b"")
    assert split_by_client(StepOutputs([one], [7], prompt_logprobs=[(two, told)])) == {
        0: StepOutputs([one], [7]),
        2: StepOutputs(prompt_logprobs=[(two, told)]),
    }
    # Nothing is shared between the parts, nor left behind for the next step.
    assert split_by_client(StepOutputs([one, two], [1, 2]))[0].tokens == [1]
