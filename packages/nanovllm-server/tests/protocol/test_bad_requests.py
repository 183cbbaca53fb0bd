"""Requests that fail before or after the check of their fields: body, headers, path, method, model, context length."""

import json

import pytest
from contract import check_refusal

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "scripted", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "scripted", "temperature": NaN}',
        b'{"model": "scripted", "temperature": Infinity}',
        b'{"model": "scripted", "temperature": 1e400}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_body_that_is_not_a_json_object_is_a_400(client, post, body):
    response = await client.post("/v1/chat/completions", data=body, headers={"Content-Type": "application/json"})
    error = await check_refusal(response, 400)
    assert "JSON" in error["message"]
    assert (await post()).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {},
    ],
)
async def test_unsupported_content_is_a_415(client, headers):
    await check_refusal(await client.post("/v1/chat/completions", data=b"{}", headers=headers), 415)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/vnd.x+json"])
async def test_json_suffix_content_types_are_accepted(client, kind):
    body = json.dumps({"model": "scripted", "messages": [USER]})
    response = await client.post("/v1/chat/completions", data=body, headers={"Content-Type": kind})
    assert response.status_code == 200


async def test_unknown_model_is_a_404(post):
    error = await check_refusal(await post(model="gpt-9"), 404, "model")
    assert error["code"] == "model_not_found"
    assert "scripted" in error["message"]


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
async def test_a_request_without_a_model_goes_to_the_served_model(client, service, model):
    service.model_names = ("scripted", "second name")
    response = await client.post("/v1/chat/completions", json={"messages": [USER], **model})
    assert response.status_code == 200
    assert (await response.get_json())["model"] == "scripted"


async def test_a_wrong_name_that_begins_with_the_name_is_a_404(post):
    await check_refusal(await post(model="scripted "), 404, "model")


async def test_checks_run_in_order_key_json_fields_model(client, service, engine):
    service.api_keys = ("secret",)
    key, json_type = {"Authorization": "Bearer secret"}, {"Content-Type": "application/json"}
    wrong = {"model": "gpt-9", "messages": [USER], "guided_json": {}}
    path = "/v1/chat/completions"
    await check_refusal(await client.post(path, data="{", headers=json_type), 401)
    await check_refusal(await client.post(path, data='{"model": "gpt-9",', headers={**json_type, **key}), 400)
    await check_refusal(await client.post(path, json=wrong, headers=key), 400, "guided_json")
    # What depends on the model, here how long its context is, comes last.
    long = {"model": "gpt-9", "messages": [USER], "max_tokens": 1_000_000}
    await check_refusal(await client.post(path, json=long, headers=key), 404, "model")
    await check_refusal(await client.post(path, json={**long, "model": "scripted"}, headers=key), 400, "max_tokens")
    assert engine.requests == []


async def test_unknown_path_is_a_404(client):
    await check_refusal(await client.post("/v1/completions", json={}), 404)
    await check_refusal(await client.get("/nothing"), 404)


async def test_wrong_method_is_a_405(client):
    response = await client.get("/v1/chat/completions")
    error = await check_refusal(response, 405)
    assert "POST" in response.headers["Allow"]
    assert "POST" in error["message"]


async def test_context_length_exceeded_has_its_code(post):
    error = await check_refusal(await post(messages=[{"role": "user", "content": "x" * 600}]), 400, "messages")
    assert error["code"] == "context_length_exceeded"


async def test_too_large_content_length_is_a_413(client, app, service, post):
    headers = {"Content-Type": "application/json", "Content-Length": str(100 << 20)}
    await check_refusal(await client.post("/v1/chat/completions", data=b"{}", headers=headers), 413)
    assert (await post()).status_code == 200
