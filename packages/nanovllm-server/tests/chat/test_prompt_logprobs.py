import math

import numpy as np
import orjson
import pytest

from nanovllm_core.outputs import PromptLogprobs
from nanovllm_server.chat.prompt_logprobs import serialize_prompt_logprobs

# The prompt after its first token, <|start|>. A token's id is its byte.
TEXT = "user:hi"


@pytest.mark.parametrize(("top", "n"), [(0, 1), (1, 1), (3, 1), (20, 3)])
async def test_each_prompt_token_but_the_first_has_its_likeliest_tokens(post, engine, top, n):
    body = await (await post(prompt_logprobs=top, n=n, seed=1)).get_json()
    first, *entries = body["prompt_logprobs"]
    assert first is None
    for character, entry in zip(TEXT, entries, strict=True):
        own_id = str(ord(character))
        assert next(iter(entry)) == own_id
        assert entry[own_id] == {"logprob": -1.5, "rank": 2, "decoded_token": character}
        # With `top` 1, the entry has the likeliest token and the prompt's own token.
        assert len(entry) == max(top, 2 if top else 1)
        if top:
            likeliest_id = str(ord(character) + 1)
            assert entry[likeliest_id] == {"logprob": -0.5, "rank": 1, "decoded_token": chr(ord(character) + 1)}
        assert sorted(token["rank"] for token in entry.values()) == ([*range(1, len(entry) + 1)] if top else [2])
    assert [request.sampling.prompt_logprobs for request in engine.requests] == [top] + [None] * (n - 1)


async def test_prompt_logprobs_are_returned_only_on_request(post, engine):
    for fields in ({}, {"prompt_logprobs": None}, {"logprobs": True, "top_logprobs": 2}):
        assert "prompt_logprobs" not in await (await post(**fields)).get_json()
    assert (await post(prompt_logprobs=None, stream=True)).status_code == 200
    assert {request.sampling.prompt_logprobs for request in engine.requests} == {None}


async def test_invalid_prompt_logprobs_error_says_what_to_do(post):
    error = (await (await post(prompt_logprobs=3, stream=True)).get_json())["error"]
    assert error["message"] == "prompt_logprobs must be left out when stream is true, not 3"
    error = (await (await post(prompt_logprobs=21)).get_json())["error"]
    assert error["message"] == "prompt_logprobs must be an integer from 0 to 20, not 21"


def test_minus_infinity_is_replaced(vocabulary):
    columns = np.float32([-math.inf]), np.int32([320]), np.int32([[258]]), np.float32([[0.0]])
    prompt_logprobs = PromptLogprobs(1, *(column.tobytes() for column in columns))
    first, entry = orjson.loads(orjson.dumps(serialize_prompt_logprobs(vocabulary, (258, 0xC3), prompt_logprobs)))
    assert first is None
    assert [*entry.values()] == [
        {"logprob": -9999.0, "rank": 320, "decoded_token": "\ufffd"},
        {"logprob": 0.0, "rank": 1, "decoded_token": "<|start|>"},
    ]


def test_prompt_of_one_token_has_one_null(vocabulary):
    assert (
        orjson.dumps(serialize_prompt_logprobs(vocabulary, (258,), PromptLogprobs(5, b"", b"", b"", b""))) == b"[null]"
    )
