"""Several clients of one engine process: each gets its own, a step at a time, and leaves nothing behind."""

import asyncio
import multiprocessing

import msgspec
from guest import occupy
from toy_model import toy_spec

from nanovllm_core import EngineClient, EngineConfig, Request, SamplingParams
from nanovllm_core.engine import wire
from nanovllm_core.engine.streams import Backlog
from nanovllm_core.request import RequestOutput, TokenLogprobs

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
        filled = [message for message in messages if message.outputs]
        # Each client heard of each step at most once: 240 outputs came in as many messages at most.
        assert len(filled) <= 2 * owner.stats.num_steps
        assert max(len(message.outputs) for message in filled) == 4
        for message in filled:
            ids = [output.id for output in message.outputs]
            assert len(set(ids)) == len(ids)
            assert len({key.split("-")[0] for key in ids}) == 1
    finally:
        await other.stop()
        await owner.stop()
    assert other.dead == owner.dead == "the engine was stopped"


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
    owner._owned.kill()
    async with asyncio.timeout(5):
        while owner.dead is None or other.dead is None:
            await asyncio.sleep(0.01)
    assert owner.dead == "the engine process died (exit code -9)"
    assert other.dead == "the engine process died"
    await other.stop()
    await owner.stop()


def test_a_backlog_is_one_output_whatever_came():
    whole = [
        RequestOutput("a", (7,), 3, 0, 1, (TokenLogprobs(-0.5, ()),)),
        RequestOutput("a", (8, 9), 3, 0, 3, (TokenLogprobs(-0.25, ()), TokenLogprobs(-1.0, ()))),
        RequestOutput("a", (5,), 3, 0, 4, (TokenLogprobs(-2.0, ()),), "stop", 5),
    ]
    backlog = Backlog()
    assert backlog.take() is None
    for output in whole:
        backlog.add(output)
    taken = backlog.take()
    assert taken == msgspec.structs.replace(
        whole[-1], new_token_ids=(7, 8, 9, 5), logprobs=sum((output.logprobs for output in whole), ())
    )
    assert backlog.take() is None
    backlog.add(whole[0])
    assert backlog.take() is whole[0]
    backlog.add(RequestOutput("a", (1,), 3, 0, 1))
    backlog.add(RequestOutput("a", (2,), 3, 0, 2))
    assert backlog.take() == RequestOutput("a", (1, 2), 3, 0, 2)
