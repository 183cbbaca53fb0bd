import json
import random

import orjson
import pytest
from contract import check_refusal

from nanovllm_server.protocol import body as body_module
from nanovllm_server.protocol.body import MAX_VALUES, parse_body
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON

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
    "value",
    ["[" + "[]," * MAX_VALUES + "[]]", "{" + ",".join(f'"{i}":1' for i in range(MAX_VALUES + 2)) + "}"],
    ids=["lists", "keys"],
)
async def test_body_with_too_many_values_is_refused_before_it_is_decoded(client, monkeypatch, value):
    monkeypatch.setattr("orjson.loads", None)
    headers = {"Content-Type": "application/json"}
    response = await client.post("/v1/chat/completions", data=f'{{"x": {value}}}', headers=headers)
    error = await check_refusal(response, 400)
    assert error["code"] == "too_many_values"
    assert "more than 250000 JSON values" in error["message"]


@pytest.mark.parametrize("text", [",", "[", '",', '\\",', "\\"], ids=repr)
def test_brackets_and_commas_inside_strings_are_not_counted_as_values(text):
    body = {"x": text * (MAX_VALUES + 1), "y": [1, "a"]}
    assert parse_body(json.dumps(body).encode()) == body


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 8])
def test_values_are_counted_the_same_in_pieces_of_any_size(monkeypatch, piece_bytes):
    """Small pieces split strings and escapes."""
    rng = random.Random(piece_bytes)

    def make_value(depth: int) -> JSON:
        kind = rng.randrange(4) if depth else 0
        if kind == 1:
            return [make_value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 2:
            return {make_text(): make_value(depth - 1) for _ in range(rng.randrange(4))}
        return make_text() if kind else rng.randrange(100)

    def make_text() -> str:
        return "".join(rng.choices(['"', "\\", "[", "{", ",", "a", ": "], k=rng.randrange(8)))

    def count_values(value: JSON) -> int:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        # `parse_body` counts opening brackets and commas: n for n children, and 1 for an empty object or list.
        return max(len(children), isinstance(value, dict | list)) + sum(map(count_values, children))

    monkeypatch.setattr(body_module, "_PIECE_BYTES", piece_bytes)
    for _ in range(300):
        value = {"x": make_value(4), "y": make_value(4)}
        data, num_values = json.dumps(value).encode(), count_values(value)
        monkeypatch.setattr(body_module, "MAX_VALUES", num_values)
        assert parse_body(data) == value
        monkeypatch.setattr(body_module, "MAX_VALUES", num_values - 1)
        with pytest.raises(ApiError, match="JSON values"):
            parse_body(data)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json; version=1; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {},
    ],
)
async def test_unsupported_content_is_a_415(client, headers):
    await check_refusal(await client.post("/v1/chat/completions", data=b"{}", headers=headers), 415)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        'application/json; charset="UTF-8"; version=1',
        "application/vnd.x+json",
    ],
)
async def test_json_content_types_are_accepted(client, content_type):
    body = json.dumps({"model": "scripted", "messages": [USER]})
    response = await client.post("/v1/chat/completions", data=body, headers={"Content-Type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize("name", ["json", "structural_tag"])
async def test_encoded_field_with_too_many_values_is_refused_before_it_is_decoded(post, name, monkeypatch):
    decode = orjson.loads
    decoded_sizes = []
    monkeypatch.setattr("orjson.loads", lambda data: decoded_sizes.append(len(data)) or decode(data))
    response = await post(structured_outputs={name: "[" + "[]," * MAX_VALUES + "[]]"})
    error = await check_refusal(response, 400, f"structured_outputs.{name}")
    assert error["code"] == "too_many_values"
    assert len(decoded_sizes) == 1


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


async def test_model_name_with_a_suffix_is_a_404(post):
    await check_refusal(await post(model="scripted "), 404, "model")


async def test_checks_run_in_order_key_json_fields_model(client, service, engine):
    service.api_keys = ("secret",)
    key, json_type = {"Authorization": "Bearer secret"}, {"Content-Type": "application/json"}
    request_with_wrong_field = {"model": "gpt-9", "messages": [USER], "guided_json": {}}
    path = "/v1/chat/completions"
    await check_refusal(await client.post(path, data="{", headers=json_type), 401)
    await check_refusal(await client.post(path, data='{"model": "gpt-9",', headers={**json_type, **key}), 400)
    await check_refusal(await client.post(path, json=request_with_wrong_field, headers=key), 400, "guided_json")
    # Checks that depend on the model, such as the context length, come last.
    long_request = {"model": "gpt-9", "messages": [USER], "max_tokens": 1_000_000}
    await check_refusal(await client.post(path, json=long_request, headers=key), 404, "model")
    await check_refusal(
        await client.post(path, json={**long_request, "model": "scripted"}, headers=key), 400, "max_tokens"
    )
    assert engine.requests == []


async def test_unknown_path_is_a_404(client):
    await check_refusal(await client.post("/v1/completions", json={}), 404)
    await check_refusal(await client.get("/nothing"), 404)
    # The base URL of this client lacks /v1.
    error = await check_refusal(await client.post("/chat/completions", json={}), 404)
    assert error["message"] == (
        "the path /chat/completions does not exist; the API of this server is /v1/chat/completions"
    )
    # A redirect would name a wrong host.
    await check_refusal(await client.post("/v1//chat/completions", json={}), 404)


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
