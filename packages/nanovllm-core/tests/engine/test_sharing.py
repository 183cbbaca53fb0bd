import asyncio
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import toy_model
from guest import occupy
from toy_model import toy_spec

from nanovllm_core import EngineClient, EngineConfig, GrammarError, Request, SamplingParams
from nanovllm_core.engine import wire
from nanovllm_core.engine.output_buffers import OutputBuffer, OutputBuffers
from nanovllm_core.engine.server import split_by_client
from nanovllm_core.outputs import (
    DraftTotals,
    PromptLogprobs,
    RequestFailure,
    RequestFinish,
    RequestOutput,
    StepOutputs,
    TokenLogprobs,
)

CONFIG = EngineConfig(device="cpu", num_blocks=128, max_num_seqs=8)


def make_greedy_request(name: str, prompt: list[int], count: int) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))


async def collect(engine: EngineClient, request: Request) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


async def wait_until_idle(engine: EngineClient, min_tokens: int) -> None:
    """Waits until the engine has generated `min_tokens` tokens and has no request. Older statistics do not count."""

    def is_idle() -> bool:
        stats = engine.stats
        is_empty = not stats.num_requests_running and stats.num_free_blocks == stats.num_blocks
        return is_empty and stats.generation_tokens >= min_tokens

    async with asyncio.timeout(60):
        while not is_idle():
            await asyncio.sleep(0.01)


async def test_a_client_of_an_idle_engine_gets_its_stats():
    owner = await EngineClient.launch(toy_spec(), CONFIG)
    try:
        await collect(owner, make_greedy_request("r", [1, 2, 3], 5))
        await wait_until_idle(owner, 5)
        guest = await EngineClient.connect(owner.address)
        async with asyncio.timeout(30):
            while guest.stats.generation_tokens != owner.stats.generation_tokens:
                await asyncio.sleep(0.01)
        await guest.stop()
    finally:
        await owner.stop()


async def test_each_client_gets_its_own_outputs_in_one_message_per_step(oracle, monkeypatch):
    messages: list[wire.Step] = []
    decode = wire.decode_to_client

    def record_steps(payload: bytes) -> wire.ToClient:
        message = decode(payload)
        if isinstance(message, wire.Step):
            messages.append(message)
        return message

    monkeypatch.setattr(wire, "decode_to_client", record_steps)
    owner = await EngineClient.launch(toy_spec(), CONFIG)
    other = await EngineClient.connect(owner.address)
    try:
        assert other.info == owner.info
        prompts = [[index, 2, 3] for index in range(8)]
        # Both clients use the same request ids.
        outputs = await asyncio.gather(
            *(collect((owner, other)[i % 2], make_greedy_request(f"r{i // 2}", p, 30)) for i, p in enumerate(prompts))
        )
        assert outputs == [oracle(prompt, 30) for prompt in prompts]
        # Both clients get the state of the idle engine, but not at the same time.
        async with asyncio.timeout(60):
            while owner.stats != other.stats or owner.stats.generation_tokens < 8 * 30:
                await asyncio.sleep(0.01)
        assert owner.stats.num_requests_running == 0
        step_outputs = [message.outputs for message in messages if message.outputs.keys]
        assert len(step_outputs) <= 2 * owner.stats.num_steps
        assert max(len(step.keys) for step in step_outputs) == 4
        for step in step_outputs:
            assert len(set(step.keys)) == len(step.keys)
            assert len({key // wire.KEYS_PER_CLIENT for key in step.keys}) == 1
    finally:
        await other.stop()
        await owner.stop()
    assert other.death_reason == owner.death_reason == "the engine was stopped"


async def test_the_engine_serves_its_owner_after_other_clients_disconnect(oracle):
    owner = await EngineClient.launch(toy_spec(), CONFIG)
    try:
        for _ in range(3):
            guest = await EngineClient.connect(owner.address)
            assert await collect(guest, make_greedy_request("a", [1, 2], 5)) == oracle([1, 2], 5)
            await guest.stop()
        assert await collect(owner, make_greedy_request("a", [1, 2], 5)) == oracle([1, 2], 5)
    finally:
        await owner.stop()


async def test_requests_of_a_killed_client_are_aborted(oracle):
    num_tokens = toy_model.LONG_CONTEXT - 2
    owner = await EngineClient.launch(toy_spec("long"), replace(CONFIG, num_blocks=3 * toy_model.LONG_CONTEXT // 16))
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe(duplex=False)
    client = context.Process(target=occupy, args=(owner.address, num_tokens, child_end))
    client.start()
    try:
        assert await asyncio.to_thread(parent_end.recv) == 3
        client.kill()
        await wait_until_idle(owner, 3)
        # A request that was not aborted would have `num_tokens` tokens.
        assert owner.stats.generation_tokens < num_tokens
        assert await collect(owner, make_greedy_request("a", [1, 2], 5)) == oracle([1, 2], 5)
    finally:
        client.kill()
        client.join()
        await owner.stop()


async def test_every_client_learns_that_the_engine_died():
    owner = await EngineClient.launch(toy_spec("failing"), CONFIG)
    other = await EngineClient.connect(owner.address)
    owner._owned_process.kill()
    async with asyncio.timeout(30):
        while owner.death_reason is None or other.death_reason is None:
            await asyncio.sleep(0.01)
    assert owner.death_reason == "the engine process died (exit code -9)"
    assert other.death_reason == "the engine process died"
    await other.stop()
    await owner.stop()


class CountingListener:
    def __init__(self) -> None:
        self.num_wakes = 0
        self.failure: str | None = None

    def wake(self) -> None:
        self.num_wakes += 1

    def fail(self, reason: str) -> None:
        self.failure = reason


def test_unread_outputs_are_merged_into_one():
    buffers, listener = OutputBuffers(), CountingListener()
    buffer = OutputBuffer(Request("a", [1, 2, 3], SamplingParams(logprobs=0)), listener)
    buffers.open(9, buffer)
    logprobs = [TokenLogprobs(-0.5, ()), TokenLogprobs(-0.25, ()), TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ())]
    assert buffer.take() is None
    buffers.dispatch(StepOutputs([9], [7], [(9, logprobs[0])], starts=[(9, 2, 1.5)]))
    assert listener.num_wakes == 1
    # Key 8 belongs to no open request.
    buffers.dispatch(StepOutputs([9, 8, 9], [8, 1, 9], [(9, logprobs[1]), (8, logprobs[0]), (9, logprobs[2])]))
    assert buffer.take() == RequestOutput("a", (7, 8, 9), 3, 2, 3, tuple(logprobs[:3]), scheduled_time=1.5)
    assert buffer.take() is None
    last_logprobs, totals = [(9, logprobs[3])], [DraftTotals(9, 2, 1), DraftTotals(8, 5, 5)]
    buffers.dispatch(StepOutputs([9], [5], last_logprobs, finishes=[RequestFinish(9, "stop", 5)], draft_totals=totals))
    buffers.dispatch(StepOutputs([9], [6]))
    assert buffer.take() == RequestOutput("a", (5,), 3, 2, 4, (logprobs[3],), "stop", 5, None, 1.5, 2, 1)
    assert buffer.take() is None
    assert not buffers.close(9), "the finished request is still open"
    buffers.fail_all("gone")
    assert listener.failure is None


def test_reader_wakes_again_for_a_grammar_failure_behind_tokens():
    buffers, listener = OutputBuffers(), CountingListener()
    buffer = OutputBuffer(Request("a", [1, 2, 3], SamplingParams()), listener)
    buffers.open(9, buffer)
    # Both steps end before the reader runs, so it has seen both notifications when it takes the tokens.
    buffers.dispatch(StepOutputs([9], [7]))
    buffers.dispatch(StepOutputs(failures=[RequestFailure(9, "too slow")]))
    assert listener.num_wakes == 2
    assert buffer.take().new_token_ids == (7,)
    assert listener.num_wakes == 3
    with pytest.raises(GrammarError, match="too slow"):
        buffer.take()
    assert listener.num_wakes == 3


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
    prompt_logprobs = buffer.take().prompt_logprobs
    assert [*prompt_logprobs] == [(-0.5, 1, ((2, -0.5),)), (-3.0, 7, ((4, -0.25),))]
    assert (len(prompt_logprobs), prompt_logprobs.num_top) == (2, 1)
    buffers.dispatch(StepOutputs([9], [8]))
    assert buffer.take().prompt_logprobs is None


def test_outputs_of_a_step_are_split_by_client():
    # Keys of clients 0 and 2.
    first_key, other_key = 5, 2 * wire.KEYS_PER_CLIENT + 5
    logprobs = TokenLogprobs(-0.5, ())
    keys, starts, finishes = [first_key, other_key, first_key], [(first_key, 16, 1.5)], [(first_key, "length", None)]
    assert split_by_client(StepOutputs(keys, [7, 8, 9], [(other_key, logprobs)], starts, finishes)) == {
        0: StepOutputs([first_key, first_key], [7, 9], [], starts, finishes),
        2: StepOutputs([other_key], [8], [(other_key, logprobs)]),
    }
    assert split_by_client(StepOutputs()) == {}
    prompt_logprobs = PromptLogprobs(0, bytes(4), bytes(4), b"", b"")
    assert split_by_client(StepOutputs([first_key], [7], prompt_logprobs=[(other_key, prompt_logprobs)])) == {
        0: StepOutputs([first_key], [7]),
        2: StepOutputs(prompt_logprobs=[(other_key, prompt_logprobs)]),
    }
    assert split_by_client(StepOutputs([first_key], [7], finishes=[(other_key, "length", None)])) == {
        0: StepOutputs([first_key], [7]),
        2: StepOutputs(finishes=[(other_key, "length", None)]),
    }
    # A later split does not reuse the lists of the earlier splits.
    assert split_by_client(StepOutputs([first_key, other_key], [1, 2]))[0].tokens == [1]
