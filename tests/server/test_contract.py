"""Tests of `check_response`, which checks every answer to OpenAI's client in this folder."""

import json
import urllib.error
import urllib.request
from dataclasses import replace

import openai
import pytest
from contract import OPENAPI_DOCUMENT, check_body, check_response

FIELDS = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 6,
    "temperature": 0,
}


def get(server, path, method="GET"):
    request = urllib.request.Request(f"{server.url}{path}", method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture
async def sdk(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


async def test_every_answer_is_recorded_for_the_check(sdk, exchanges):
    await sdk.chat.completions.create(**FIELDS, n=2, logprobs=True, top_logprobs=2)
    stream = await sdk.chat.completions.create(
        **FIELDS, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}
    )
    assert len([chunk async for chunk in stream]) > 12
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(**{**FIELDS, "model": "gpt"})
    assert len((await sdk.models.list()).data) == 1
    assert [exchange.status for exchange in exchanges] == [200, 200, 404, 200]
    assert all(exchange.body for exchange in exchanges)


async def test_answers_that_break_the_contract_fail_the_check(sdk, exchanges):
    await sdk.chat.completions.create(**FIELDS)
    stream = await sdk.chat.completions.create(**FIELDS, stream=True)
    assert [chunk async for chunk in stream]
    whole, streamed = exchanges
    for old, new in (
        (b'"object":"chat.completion"', b'"object":"text_completion"'),
        (b'"refusal":null', b'"refusal":null,"extra":1'),
        (b'"index":0', b'"index":"0"'),
        (b'"finish_reason":"length"', b'"finish_reason":"done"'),
    ):
        assert old in whole.body
        with pytest.raises(ValueError, match=r".+"):
            check_response(replace(whole, body=whole.body.replace(old, new)))
    for old, new in (
        (b'"role":"assistant",', b""),
        (b"data: [DONE]\n\n", b""),
        (b'"finish_reason":null', b'"finish_reason":"stop"'),
        (b'"delta":{}', b'"delta":{"role":"assistant"}'),
    ):
        assert old in streamed.body
        with pytest.raises((ValueError, AssertionError)):
            check_response(replace(streamed, body=streamed.body.replace(old, new)))


def test_other_endpoints_fit_the_contract(server):
    assert check_body("Health", get(server, "/health")[1]) == {"status": "ok"}
    (model,) = check_body("ModelList", get(server, "/v1/models")[1])["data"]
    assert model["id"] == FIELDS["model"]
    for path, method, status in (("/nothing", "GET", 404), ("/v1/models", "DELETE", 405)):
        code, body = get(server, path, method)
        assert code == status
        check_body("Error", body)


def test_the_openapi_document_has_the_schemas_of_the_check(server):
    """Only the request schema differs: it has the server's limits."""
    status, body = get(server, "/openapi.json")
    assert status == 200
    served = json.loads(body)
    schemas, expected = served["components"]["schemas"], OPENAPI_DOCUMENT["components"]["schemas"]
    request = schemas.pop("ChatCompletionRequest")
    assert schemas == {name: schema for name, schema in expected.items() if name != "ChatCompletionRequest"}
    assert request["properties"]["stop_token_ids"]["items"]["maximum"] == 49151
    assert "security" not in served["paths"]["/v1/models"]["get"]
