import asyncio
import json
import re
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import pytest

ALWAYS_DRAFTING_SERVER = Path(__file__).parent / "support" / "always_drafting_server.py"
MODEL = "shallow"
TEXT = "The blue door leads to the garden. The red door leads to the street. The green door leads to the cellar."
MESSAGES = [{"role": "user", "content": f"Repeat this text word for word, twice:\n{TEXT}"}]
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "cities": {"type": "array", "maxItems": 4}},
    "required": ["city", "cities"],
    "additionalProperties": False,
}
PREDICTION = {"type": "content", "content": [{"type": "text", "text": f"{TEXT} {TEXT}"}]}
# In long answers, the model repeats itself. The engine then accepts drafts of n-grams.
REQUESTS = {
    "greedy": {"temperature": 0, "max_tokens": 80, "extra_body": {"ignore_eos": True}},
    "greedy with a prediction": {"temperature": 0, "max_tokens": 60, "prediction": PREDICTION},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 3, "n": 2, "max_tokens": 60},
    "min_p": {"temperature": 1.2, "seed": 5, "max_tokens": 60, "extra_body": {"min_p": 0.1, "top_k": 20}},
    "penalties": {
        "temperature": 0.5,
        "seed": 7,
        "max_tokens": 80,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.5,
        "logit_bias": {"28": 1.5},
    },
    "log-probabilities": {"temperature": 0, "max_tokens": 60, "logprobs": True, "top_logprobs": 3},
    "stop string": {"temperature": 0, "max_tokens": 80, "stop": ["green"]},
    "schema": {
        "temperature": 0,
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA}},
    },
}


@pytest.fixture(scope="module", params=["ngram", "draft"])
def speculating_server(request, run_server: Callable, shallow_model: Path) -> Iterator:
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--cpu-cache-gib", "0.25", "--max-num-seqs", "20")
    draft_model = ("--draft-model", str(shallow_model)) if request.param == "draft" else ()
    # With the measured times, this draft model may save no time. The engine then uses no drafts.
    program = (sys.executable, ALWAYS_DRAFTING_SERVER)
    with run_server(shallow_model, *flags, "--speculate", request.param, *draft_model, program=program) as server:
        yield server


def open_client(server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=300)


@pytest.fixture
async def client(speculating_server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with open_client(speculating_server) as client:
        yield client


async def create(client: openai.AsyncOpenAI, **fields):
    return await client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)


async def answer_all(client: openai.AsyncOpenAI) -> list:
    return await asyncio.gather(*(create(client, **fields) for fields in REQUESTS.values()))


@pytest.fixture(scope="module")
def expected_answers(shallow_server) -> list:
    async def ask() -> list:
        async with open_client(shallow_server) as client:
            return await answer_all(client)

    return asyncio.run(ask())


def draft_totals(server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^nanovllm:spec_decode_(\w+)_total\{.*\} (\S+)$", text, re.MULTILINE):
        totals[name] = totals.get(name, 0) + float(value)
    return totals


def check_same_answer(expected, actual) -> None:
    for choice, other in zip(expected.choices, actual.choices, strict=True):
        assert other.message == choice.message
        assert other.finish_reason == choice.finish_reason
        if choice.logprobs is not None:
            assert [entry.token for entry in other.logprobs.content] == [
                entry.token for entry in choice.logprobs.content
            ]
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            assert [entry.logprob for entry in other.logprobs.content] == pytest.approx(logprobs, abs=1e-3)
    assert token_counts(actual.usage) == token_counts(expected.usage)
    details = expected.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def token_counts(usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


async def test_simultaneous_answers_are_the_same_with_and_without_drafts(client, expected_answers):
    actual = await answer_all(client)
    for answer, other in zip(expected_answers, actual, strict=True):
        check_same_answer(answer, other)
    (choice,) = actual[list(REQUESTS).index("schema")].choices
    assert choice.finish_reason == "stop"
    assert set(json.loads(choice.message.content)) == {"city", "cities"}
    details = [answer.usage.completion_tokens_details for answer in actual]
    assert sum(counts.accepted_prediction_tokens for counts in details) > 20
    assert sum(counts.rejected_prediction_tokens for counts in details) > 20


# The engine counts the drafts of all methods alike.
@pytest.mark.parametrize("speculating_server", ["ngram"], indirect=True)
async def test_usage_and_metrics_count_the_drafts(client, shallow_server, speculating_server):
    before = draft_totals(speculating_server)
    answer = await create(client, **REQUESTS["greedy"])
    details = answer.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < answer.usage.completion_tokens == 80
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = [chunk async for chunk in await create(client, **REQUESTS["greedy"], **options)]
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
    await asyncio.sleep(0.3)  # Statistics of the engine may be 0.1 s old.
    after = draft_totals(speculating_server)
    verified, accepted, steps = (
        after[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens", "num_drafts")
    )
    assert 0 < accepted <= verified <= 5 * steps
    assert after["num_draft_tokens_per_pos"] == after["num_draft_tokens"]
    assert after["num_accepted_tokens_per_pos"] == after["num_accepted_tokens"]
    assert draft_totals(shallow_server) == {}
