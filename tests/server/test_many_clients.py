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
# `max_tokens` of clients that leave: too many tokens for a request that ends by itself.
NUM_LEAVER_TOKENS = 900


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


def read_metrics(server) -> dict[str, float]:
    """Values by name. The names of `request_success_total` include the finish reason."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    samples = re.findall(r'^nanovllm:(\w+){(?:.*finished_reason="(\w+)")?[^}]*} (\S+)$', text, re.MULTILINE)
    return {f"{name}_{reason}".rstrip("_"): float(value) for name, reason, value in samples}


async def stream(sdk, index: int, leave_after: int | None = None) -> StreamResult:
    response = await sdk.chat.completions.create(
        model="shallow",
        messages=[{"role": "user", "content": f"Tell me something about the number {index}."}],
        temperature=0,
        max_tokens=NUM_TOKENS if leave_after is None else NUM_LEAVER_TOKENS,
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
    before = read_metrics(shallow_server)
    answers = await asyncio.gather(*(stream(sdk, index, leavers.get(index)) for index in range(NUM_CLIENTS)))
    num_aborted_before = before["request_success_total_abort"]
    async with asyncio.timeout(30):
        while (
            (after := read_metrics(shallow_server))["num_requests_running"]
            or after["num_requests_waiting"]
            or after["request_success_total_abort"] < num_aborted_before + NUM_LEAVERS
        ):
            await asyncio.sleep(0.1)
    assert after["kv_cache_usage_perc"] == 0
    assert after["request_success_total_abort"] == num_aborted_before + NUM_LEAVERS
    # A leaver's request that the engine did not abort would have generated NUM_LEAVER_TOKENS tokens.
    num_answer_tokens = (NUM_CLIENTS - NUM_LEAVERS) * NUM_TOKENS
    num_generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert num_generated - num_answer_tokens < NUM_LEAVER_TOKENS
    reference = load_reference(shallow_model, torch.float32, "cpu")
    tokenizer = load_tokenizer(shallow_model)
    for index, result in enumerate(answers):
        assert result.tokens == greedy_choices(reference, result.prompt, result.tokens)
        text = tokenizer.backend.decode(result.tokens, skip_special_tokens=True)
        assert text.startswith(result.text) if index in leavers else text == result.text
    again = await stream(sdk, NUM_CLIENTS - 1)
    assert again == answers[-1]
