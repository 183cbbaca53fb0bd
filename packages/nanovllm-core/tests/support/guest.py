"""A program that connects to an engine and never disconnects."""

import asyncio
from multiprocessing.connection import Connection

from nanovllm_core import EngineAddress, EngineClient, Request, SamplingParams


def occupy(address: EngineAddress, num_tokens: int, report: Connection) -> None:
    """Sends three requests for `num_tokens` tokens each, and reports their number once each has its first token."""

    async def main() -> None:
        engine = await EngineClient.connect(address)
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        streams = [engine.generate(Request(f"r{index}", [index, 2], sampling)) for index in range(3)]
        for stream in streams:
            await anext(stream)
        report.send(len(streams))
        await asyncio.sleep(3600)

    asyncio.run(main())
