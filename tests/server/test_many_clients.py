import asyncio
import random
import re
import urllib.request
from dataclasses import dataclass, field

import openai
import pytest
import torch

from nanovllm_models import load_tokenizer

NUM_CLIENTS, NUM_LEAVERS, NUM_TOKENS = 40, 12, 20


@dataclass
class StreamResult:
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""


@pytest.fixture
async def sdk(shallow_server):
    async with openai.AsyncOpenAI(
        base_url=f"{shallow_server.url}/v1", api_key="any", max_retries=0, timeout=300
    ) as client:
        yield client


def gauge(server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    return float(re.search(rf"nanovllm:{name}{{[^}}]*}} (\S+)", text)[1])


async def stream(sdk, index: int, leave_after: int | None = None) -> StreamResult:
    response = await sdk.chat.completions.create(
        model="shallow",
        messages=[{"role": "user", "content": f"Tell me something about the number {index}."}],
        temperature=0,
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    result, num_pieces, usage = StreamResult(), 0, None
    async for chunk in response:
        usage = chunk.usage
        result.prompt += (chunk.model_extra or {}).get("prompt_token_ids", [])
        if chunk.choices:
            (choice,) = chunk.choices
            result.tokens += (choice.model_extra or {}).get("token_ids") or []
            result.text += choice.delta.content or ""
            num_pieces += bool(choice.delta.content)
        if leave_after is not None and num_pieces >= leave_after:
            await response.close()
            return result
    assert usage.completion_tokens == len(result.tokens) == NUM_TOKENS
    return result


async def test_streams_lose_no_token_and_disconnects_free_everything(
    sdk, shallow_server, shallow_model, load_reference, greedy_choices
):
    rng = random.Random(0)
    leavers = {index: rng.randrange(1, 6) for index in rng.sample(range(NUM_CLIENTS), NUM_LEAVERS)}
    answers = await asyncio.gather(*(stream(sdk, index, leavers.get(index)) for index in range(NUM_CLIENTS)))
    async with asyncio.timeout(30):
        while gauge(shallow_server, "num_requests_running") + gauge(shallow_server, "num_requests_waiting"):
            await asyncio.sleep(0.1)
    assert gauge(shallow_server, "kv_cache_usage_perc") == 0
    reference = load_reference(shallow_model, torch.float32, "cpu")
    tokenizer = load_tokenizer(shallow_model)
    for index, result in enumerate(answers):
        assert result.tokens == greedy_choices(reference, result.prompt, result.tokens)
        text = tokenizer.backend.decode(result.tokens, skip_special_tokens=True)
        assert text.startswith(result.text) if index in leavers else text == result.text
    again = await stream(sdk, NUM_CLIENTS - 1)
    assert again == answers[-1]
