import pytest

from nanovllm_server.bench.client import parse_base_url
from nanovllm_server.bench.server_cases.case_client import CaseClient
from nanovllm_server.bench.server_cases.prompt_texts import (
    PromptTokenCosts,
    conversation,
    measure_token_costs,
    single_message,
    with_next_turn,
)


async def test_request_without_an_answer_ends_at_the_time_limit(url, engine):
    engine.delay = 60.0
    client = CaseClient([parse_base_url(f"{url}/v1", None)], "scripted", temperature=0.0, timeout_s=0.2)
    assert await client.send([{"role": "user", "content": "Hello"}], 4) is None
    assert client.errors == ["no whole answer within 0.2 s: raise --timeout"]


def count_tokens(messages, per_word=2, per_message=5, per_request=3) -> int:
    words = sum(len(message["content"].split()) for message in messages)
    return per_request + per_message * len(messages) + per_word * words


async def test_token_costs_are_those_of_the_server():
    async def count_tokens_of_server(messages):
        return count_tokens(messages)

    assert await measure_token_costs(count_tokens_of_server) == PromptTokenCosts(
        per_word=2, per_message=5, per_request=3
    )


def test_prompts_have_the_requested_length():
    costs = PromptTokenCosts(per_word=2, per_message=5, per_request=3)
    assert count_tokens(single_message(costs, 1008, "seed")) == 1008
    history = conversation(costs, 3000, 100, "seed")
    assert count_tokens(history) == pytest.approx(3000, abs=1)
    assert [message["role"] for message in history] == [*["user", "assistant"] * 15, "user"]
    assert max(count_tokens([message]) for message in history) < 110
    turn = with_next_turn(costs, history, 25, 75, "seed")
    assert turn[: len(history)] == history
    assert [message["role"] for message in turn[len(history) :]] == ["assistant", "user"]
    assert [count_tokens([message], per_request=0) for message in turn[len(history) :]] == [25, 75]


def test_prompts_are_never_empty():
    costs = PromptTokenCosts(per_word=1, per_message=5, per_request=30)
    for messages in (single_message(costs, 1, ""), conversation(costs, 9, 3, ""), with_next_turn(costs, [], 1, 1, "")):
        assert all(message["content"] for message in messages)
