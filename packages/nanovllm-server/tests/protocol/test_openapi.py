"""The OpenAPI document agrees with the request reader and with the routes."""

import copy

import jsonschema_rs
import pytest

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.openapi import EXAMPLES, FIELD_DESCRIPTIONS
from nanovllm_server.protocol.request import Limits, SamplingDefaults, read_chat_request
from nanovllm_server.protocol.schema_recording import record_schema

LIMITS, DEFAULTS = Limits(max_model_len=512, vocab_size=320, max_sequences=8), SamplingDefaults()
METHODS = {"get", "post"}


@pytest.fixture
async def openapi_document(client):
    response = await client.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/json"
    return await response.get_json()


@pytest.fixture
def properties(openapi_document):
    return openapi_document["components"]["schemas"]["ChatCompletionRequest"]["properties"]


def make_validator(openapi_document, name):
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": openapi_document["components"]}
    )


def test_document_has_exactly_the_routes_of_the_app(openapi_document, app):
    routes = {
        (rule.rule.replace("<path:", "{").replace(">", "}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in rule.methods
    }
    described = {(path, method) for path, item in openapi_document["paths"].items() for method in item}
    assert described == {(path, method) for path, method in routes if method in METHODS}


def test_headers_of_responses_are_documented(openapi_document):
    responses = openapi_document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert all("X-Request-Id" in response["headers"] for response in responses.values())
    for header, statuses in {"Retry-After": {"429", "503"}, "X-Should-Retry": {"504"}}.items():
        assert {status for status, response in responses.items() if header in response["headers"]} == statuses


def test_every_reference_resolves(openapi_document):
    def follow(value):
        match value:
            case {"$ref": reference}:
                here = openapi_document
                for step in reference.removeprefix("#/").split("/"):
                    here = here[step]
            case dict():
                for inner in value.values():
                    follow(inner)
            case list():
                for inner in value:
                    follow(inner)

    follow(openapi_document)
    for name in openapi_document["components"]["schemas"]:
        make_validator(openapi_document, name)


async def test_document_requires_a_key_where_the_server_does(service, openapi_document):
    from nanovllm_server.http.app import create_app

    chat = ("paths", "/v1/chat/completions", "post")
    assert "security" not in openapi_document[chat[0]][chat[1]][chat[2]]
    assert "securitySchemes" not in openapi_document["components"]
    service.api_keys = ("secret",)
    response = await create_app(service).test_client().get("/openapi.json")
    assert response.status_code == 200
    document_with_key = await response.get_json()
    assert document_with_key["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    paths_with_key = {
        path for path, item in document_with_key["paths"].items() for method in item.values() if "security" in method
    }
    assert paths_with_key == {"/v1/chat/completions", "/v1/models", "/v1/models/{name}"}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("max_tokens", {"type": ["integer", "null"], "minimum": 1}),
        ("temperature", {"type": ["number", "null"], "minimum": 0, "maximum": 2}),
        ("top_p", {"type": ["number", "null"], "minimum": 0, "maximum": 1}),
        ("n", {"type": ["integer", "null"], "minimum": 1, "maximum": 8}),
        ("model", {"type": ["string", "null"]}),
        ("cache_salt", {"type": ["string", "null"], "maxLength": 256}),
        (
            "stop_token_ids",
            {"type": ["array", "null"], "maxItems": 64, "items": {"type": "integer", "minimum": 0, "maximum": 319}},
        ),
    ],
)
def test_documented_ranges_are_those_of_the_reader(properties, name, schema):
    assert {key: value for key, value in properties[name].items() if key != "description"} == schema


def test_unsupported_fields_are_not_documented(properties):
    assert not {"guided_json", "logits_processors", "audio"} & set(properties)


def test_every_description_belongs_to_a_field(properties):
    assert set(FIELD_DESCRIPTIONS) <= set(properties)
    for name, text in FIELD_DESCRIPTIONS.items():
        assert properties[name]["description"] == text


def test_required_fields_are_documented(openapi_document):
    request = openapi_document["components"]["schemas"]["ChatCompletionRequest"]
    assert request["required"] == ["messages"]
    message = request["properties"]["messages"]["items"]
    # An assistant that calls tools needs no content.
    assert message["required"] == ["role"]
    assert message["properties"]["tool_calls"]["items"]["required"] == ["function"]
    assert request["properties"]["tools"]["items"]["required"] == ["type", "function"]


def find_leaf_paths(value, steps=()):
    match value:
        case dict():
            for key, inner in value.items():
                yield from find_leaf_paths(inner, (*steps, key))
        case list():
            for index, inner in enumerate(value):
                yield from find_leaf_paths(inner, (*steps, index))
        case _:
            yield steps


REQUESTS = {name: {"model": "MODEL", **example} for name, example in EXAMPLES.items()}
LEAF_PATHS = [(name, steps) for name, example in REQUESTS.items() for steps in find_leaf_paths(example)]


@pytest.mark.parametrize("value", [None, 7, True, "?", [], {}], ids=repr)
def test_schema_accepts_all_values_that_the_reader_accepts(openapi_document, value):
    """The reader may refuse more values, for example because of another field."""
    validator = make_validator(openapi_document, "ChatCompletionRequest")
    refused_by_schema = []
    for name, steps in LEAF_PATHS:
        example = copy.deepcopy(REQUESTS[name])
        here = example
        for step in steps[:-1]:
            here = here[step]
        here[steps[-1]] = value
        if is_accepted_by_reader(example) and not validator.is_valid(example):
            refused_by_schema.append((name, steps))
    assert refused_by_schema == []


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
        {"kv_transfer_params": {}},
    ],
    ids=str,
)
def test_schema_accepts_every_kind_of_an_object(openapi_document, fields):
    request = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert is_accepted_by_reader(request)
    make_validator(openapi_document, "ChatCompletionRequest").validate(request)


def is_accepted_by_reader(request):
    try:
        read_chat_request(FieldReader(request), LIMITS, DEFAULTS)
    except ApiError:
        return False
    return True


def test_examples_are_valid_requests(openapi_document):
    content = openapi_document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        assert example["value"]["model"] == "scripted"
        make_validator(openapi_document, "ChatCompletionRequest").validate(example["value"])


def test_invalid_example_is_an_error():
    with pytest.raises(ApiError):
        record_schema(lambda body: read_chat_request(body, LIMITS, DEFAULTS), [{"model": "m", "messages": []}])


def test_field_with_two_readers_accepts_either_type():
    def read(body):
        if isinstance(body.raw("choice"), dict):
            body.child("choice").text("name")
        else:
            body.one_of("choice", ("auto", "none"))

    schema = record_schema(read, [{"choice": "auto"}, {"choice": {"name": "f"}}])
    assert schema["properties"]["choice"] == {
        "anyOf": [
            {"type": "string", "enum": ["auto", "none"]},
            {"type": "object", "properties": {"name": {"type": ["string", "null"]}}},
            {"type": "null"},
        ]
    }


def test_unchecked_reads_do_not_widen_a_schema():
    def read(body):
        body.raw("a")
        body.integer("a", 1)
        body.raw("a")
        inner = body.child("b")
        return None if inner is None else inner.boolean("c")

    schema = record_schema(read, [{}, {"b": {"c": True}}])
    assert schema == {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"], "minimum": 1},
            "b": {"type": ["object", "null"], "properties": {"c": {"type": ["boolean", "null"]}}},
        },
    }
