"""Sixty-four clients stream at once from the default model; some leave midway."""

import asyncio
import random
import re
import urllib.request
from collections.abc import Iterator

import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
CLIENTS, LEAVERS, TOKENS = 64, 20, 24


@pytest.fixture(scope="module")
def busy_server(run_server, default_model) -> Iterator:
    """In float32, where a token does not depend on the company it is computed in."""
    with run_server(default_model, "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32") as server:
        yield server


@pytest.fixture
async def sdk(busy_server):
    async with openai.AsyncOpenAI(
        base_url=f"{busy_server.url}/v1", api_key="any", max_retries=0, timeout=300
    ) as client:
        yield client


def gauge(server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    return float(re.search(rf"nanovllm:{name}{{[^}}]*}} (\S+)", text)[1])


async def stream(sdk, index: int, leave_after: int | None = None) -> str:
    """The text of one stream, or of its beginning."""
    response = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Tell me something about the number {index}."}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, seen, usage = "", 0, None
    async for chunk in response:
        usage = chunk.usage
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            seen += 1
        if leave_after is not None and seen >= leave_after:
            await response.close()
            return text
    assert usage.completion_tokens == TOKENS
    return text


async def test_nothing_is_lost_or_doubled_and_leavers_free_all(sdk, busy_server):
    rng = random.Random(0)
    leavers = {index: rng.randrange(1, 6) for index in rng.sample(range(CLIENTS), LEAVERS)}
    texts = await asyncio.gather(*(stream(sdk, index, leavers.get(index)) for index in range(CLIENTS)))
    async with asyncio.timeout(30):
        while gauge(busy_server, "num_requests_running") + gauge(busy_server, "num_requests_waiting"):
            await asyncio.sleep(0.1)
    assert gauge(busy_server, "kv_cache_usage_perc") == 0
    for index in range(CLIENTS):
        alone = await stream(sdk, index)
        if index in leavers:
            assert alone.startswith(texts[index])
        else:
            assert texts[index] == alone
