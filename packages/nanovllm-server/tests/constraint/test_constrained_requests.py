"""The grammars that HTTP requests give to the engine."""

import asyncio
import json

import openai
import pytest
from sse import parse_events

from nanovllm_core.grammar_types import GrammarSpec
from nanovllm_core.sampling_params import ReasoningBudget
from nanovllm_models.chat_formats import HERMES, LLAMA, MINIMAX_M2, THINK, ChatFormat
from nanovllm_server.parsing.model_format import ModelFormat

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]
STRICT_TOOLS = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
NAMED_TOOL_CHOICE = {"type": "function", "function": {"name": "look"}}
PLAIN_FORMAT, THINKING_FORMAT = ChatFormat(None, HERMES), ChatFormat(THINK, HERMES)
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def set_reply(engine, service, vocabulary):
    def set_reply(form, reply="ok"):
        service.model_format = ModelFormat(form, vocabulary)
        engine.reply = [*reply.encode()]

    return set_reply


@pytest.fixture
def send_and_get_grammar(post, engine):
    async def send_and_get_grammar(**fields):
        response = await post(**fields)
        assert response.status_code == 200, await response.get_data()
        spec = engine.requests[-1].sampling.grammar
        assert engine.compiled[-1:] == ([spec] if spec is not None else [])
        return spec

    return send_and_get_grammar


def list_elements(spec):
    assert spec.kind == "structural_tag"
    form = json.loads(spec.source)["format"]
    return form["elements"] if form["type"] == "sequence" else [form]


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": JSON_SCHEMA}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_answer_without_reasoning_matches_the_requested_format(send_and_get_grammar, fields, kind, source):
    spec = await send_and_get_grammar(**fields)
    assert spec.kind == kind
    assert (json.loads(spec.source) if kind == "json_schema" else spec.source) == source


async def test_free_answers_have_no_grammar(send_and_get_grammar, set_reply):
    set_reply(THINKING_FORMAT)
    for fields in (
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": STRICT_TOOLS, "tool_choice": "none"},
    ):
        assert await send_and_get_grammar(**fields) is None


async def test_choices_become_literals(send_and_get_grammar):
    (choices,) = list_elements(await send_and_get_grammar(structured_outputs={"choice": ["a", 'b"']}))
    assert [element["value"] for element in choices["elements"]] == ["a", 'b"']


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_structural_tag_is_passed_on(send_and_get_grammar, as_text):
    inner = {"type": "json_schema", "json_schema": SCHEMA}
    form = {"type": "tag", "begin": "<a>", "content": inner, "end": "</a>"}

    def with_place(path):
        return {**form, "content": {**inner, "place": f"{path}.format.content.json_schema"}}

    tag = {"type": "structural_tag", "format": form}
    assert list_elements(await send_and_get_grammar(response_format=tag)) == [with_place("response_format")]
    spec = await send_and_get_grammar(structured_outputs={"structural_tag": json.dumps(tag) if as_text else tag})
    assert list_elements(spec) == [with_place("structured_outputs.structural_tag")]


@pytest.mark.parametrize("fields", [{"response_format": JSON_SCHEMA}, {"tools": TOOLS, "tool_choice": "required"}])
async def test_reasoning_precedes_the_constraint(send_and_get_grammar, set_reply, fields):
    set_reply(THINKING_FORMAT)
    free_part, *_ = list_elements(await send_and_get_grammar(**fields))
    assert free_part["type"] == "optional"
    begun_part, *_ = list_elements(await send_and_get_grammar(**fields, chat_template_kwargs={"opening": "<think>\n"}))
    assert begun_part["type"] == "any_text"
    assert begun_part["excludes"] == ["</think>", *(["<tool_call>"] if "tools" in fields else [])]
    grammar_after_reasoning = await send_and_get_grammar(
        **fields, chat_template_kwargs={"opening": "<think>\n\n</think>\n\n"}
    )
    set_reply(PLAIN_FORMAT)
    assert await send_and_get_grammar(**fields) == grammar_after_reasoning


async def test_named_and_required_calls_are_enforced(send_and_get_grammar, set_reply):
    set_reply(PLAIN_FORMAT)
    named, schema, end = list_elements(await send_and_get_grammar(tools=TOOLS, tool_choice=NAMED_TOOL_CHOICE))
    assert named["value"] == '<tool_call>\n{"name": "look", "arguments": '
    assert (schema["type"], schema["json_schema"]) == ("json_schema", SCHEMA)
    assert (schema["place"], schema["objects_only"]) == ("tools[0].function.parameters", True)
    assert end["value"] == "}\n</tool_call>"
    required = await send_and_get_grammar(tools=TOOLS, tool_choice="required")
    only_look = {"mode": "required", "tools": [NAMED_TOOL_CHOICE]}
    allowed = await send_and_get_grammar(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": only_look})
    assert '"name\\": \\"ping' in required.source
    assert "ping" not in allowed.source
    # A function without parameters gets no arguments.
    assert '"json_schema":{"type":"object","properties":{},"additionalProperties":false}' in required.source
    single = await send_and_get_grammar(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [part["type"] for part in list_elements(required)].count("repeat") == 1
    assert "repeat" not in single.source


async def test_strict_functions_constrain_calls_but_not_text(send_and_get_grammar, set_reply):
    set_reply(PLAIN_FORMAT)
    text, calls = list_elements(await send_and_get_grammar(tools=STRICT_TOOLS))
    assert text == {"type": "any_text", "excludes": ["<tool_call>"]}
    assert calls["type"] == "repeat"
    set_reply(ChatFormat(None, LLAMA))
    (alternatives,) = list_elements(await send_and_get_grammar(tools=STRICT_TOOLS))
    assert alternatives["type"] == "or"


async def test_answer_with_a_schema_may_be_a_call(send_and_get_grammar, post, set_reply):
    set_reply(PLAIN_FORMAT, CALL)
    (alternatives,) = list_elements(await send_and_get_grammar(tools=TOOLS, response_format=JSON_SCHEMA))
    assert alternatives["type"] == "or"
    fields = {"tools": TOOLS, "response_format": JSON_SCHEMA}
    choice = (await (await post(**fields)).get_json())["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)
    text = json.dumps({"city": CALL})
    set_reply(PLAIN_FORMAT, text)
    choice = (await (await post(**fields)).get_json())["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tool_choice", "max_tokens", "reason"),
    [
        ("auto", None, "tool_calls"),
        ("required", None, "tool_calls"),
        (NAMED_TOOL_CHOICE, None, "stop"),
        ("required", 50, "length"),
        (NAMED_TOOL_CHOICE, 50, "length"),
    ],
    ids=str,
)
async def test_finish_reason_depends_on_tool_choice_and_length(
    post, set_reply, stream, tool_choice, max_tokens, reason
):
    set_reply(PLAIN_FORMAT, CALL)
    response = await post(tools=TOOLS, tool_choice=tool_choice, max_tokens=max_tokens, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in parse_events(await response.get_data())]
        assert choices[-1]["finish_reason"] == reason
        assert any("tool_calls" in choice["delta"] for choice in choices)
    else:
        choice = (await response.get_json())["choices"][0]
        assert choice["finish_reason"] == reason
        assert choice["message"]["tool_calls"]


async def test_reasoning_budget_reaches_the_engine(post, engine, set_reply, service, vocabulary, monkeypatch):
    set_reply(THINKING_FORMAT, "Hm.</think>\n\nok")
    # The end tag is not a single token of this tokenizer, so the server refuses a budget.
    response = await post(max_reasoning_tokens=3)
    assert (await response.get_json())["error"]["param"] == "max_reasoning_tokens"
    assert response.status_code == 400
    monkeypatch.setattr(vocabulary, "find_id", {"</think>": 300}.get)
    choice = (await (await post(max_reasoning_tokens=3)).get_json())["choices"][0]
    request = engine.requests[-1]
    assert request.sampling.reasoning_budget == ReasoningBudget(3, (300,))
    assert request.prompt_ids[-10:].tolist() == [*b"hi<think>\n"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "ok")
    await post(max_reasoning_tokens=2**62, chat_template_kwargs={"opening": "<think>\n"})
    assert engine.requests[-1].sampling.reasoning_budget == ReasoningBudget(512, (300,))
    assert engine.requests[-1].prompt_ids[-10:].tolist() == [*b"hi<think>\n"]
    await post(max_reasoning_tokens=3, chat_template_kwargs={"opening": "<think>\n</think>"})
    assert engine.requests[-1].sampling.reasoning_budget is None
    set_reply(PLAIN_FORMAT)
    await post(max_reasoning_tokens=3)
    assert engine.requests[-1].sampling.reasoning_budget is None


async def test_constraint_applies_to_every_choice(post, engine):
    body = await (await post(n=3, seed=1, logprobs=True, structured_outputs={"regex": "Hello"})).get_json()
    assert len(body["choices"]) == 3
    assert {request.sampling.grammar for request in engine.requests} == {GrammarSpec("regex", "Hello")}
    assert engine.compiled == [GrammarSpec("regex", "Hello")]


UNIQUE = {"type": "array", "uniqueItems": True}


def strict_tools(**parameters):
    return [TOOLS[1], {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize("reasoning", [None, THINK])
@pytest.mark.parametrize("calls", [HERMES, MINIMAX_M2], ids=["JSON", "XML"])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": json_schema(UNIQUE)}, "response_format.json_schema.schema/uniqueItems", "unsupported"),
        ({"structured_outputs": {"json": {"type": "integr"}}}, "structured_outputs.json/type", "invalid"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": UNIQUE}}},
            "response_format.format.json_schema/uniqueItems",
            "unsupported",
        ),
        ({"tools": strict_tools(type="string")}, "tools[1].function.parameters", "invalid"),
        (
            {"tools": strict_tools(type="object", properties={"a": UNIQUE}), "tool_choice": "required"},
            "tools[1].function.parameters/properties/a/uniqueItems",
            "unsupported",
        ),
        # The server also checks schemas that have no effect on the answer.
        (
            {"response_format": json_schema(UNIQUE), "tools": TOOLS, "tool_choice": "required"},
            "response_format.json_schema.schema/uniqueItems",
            "unsupported",
        ),
        (
            {
                "response_format": {"type": "structural_tag", "format": {"type": "any_text"}},
                "tools": strict_tools(type="object", minProperties=-1),
            },
            "tools[1].function.parameters/minProperties",
            "invalid",
        ),
    ],
    ids=str,
)
async def test_schema_that_cannot_be_enforced_is_a_400_of_its_keyword(
    post, engine, service, set_reply, fields, param, code, calls, reasoning
):
    set_reply(ChatFormat(reasoning, calls))
    response = await post(**fields)
    error = (await response.get_json())["error"]
    codes = {"invalid": "invalid_value", "unsupported": "unsupported_schema"}
    assert (response.status_code, error["param"], error["code"]) == (400, param, codes[code])
    assert param in error["message"]
    assert engine.requests == []
    assert service.admission.num_active == 0


async def test_parameters_that_elements_cannot_hold_are_a_400(post, engine, set_reply):
    set_reply(ChatFormat(None, MINIMAX_M2))
    tools = strict_tools(type="object", properties={"a": {"type": "string"}, "b\n": {"type": "string"}})
    error = (await (await post(tools=tools)).get_json())["error"]
    assert (error["param"], error["code"]) == ("tools[1].function.parameters/properties/b\n", "unsupported_parameter")
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "refused_text", "param"),
    [
        ({"response_format": JSON_SCHEMA}, "city", "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "x"}}, "x", "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x"}}, "x", "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": ["a", "x"]}}, "x", "structured_outputs.choice"),
        ({"tools": STRICT_TOOLS}, "city", "tools[0].function.parameters"),
        ({"tools": [TOOLS[1], TOOLS[0]], "tool_choice": "required"}, "city", "tools[1].function.parameters"),
        # No single function causes this error.
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_call", "tools"),
    ],
    ids=str,
)
async def test_invalid_grammar_is_a_400_of_its_field(
    post, engine, service, set_reply, fields, refused_text, param, stream
):
    set_reply(PLAIN_FORMAT)
    engine.grammar_errors = {refused_text: "it takes more than 10 s to compile"}
    response = await post(**fields, stream=stream)
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_grammar")
    assert "more than 10 s" in error["message"]
    assert param in error["message"]
    assert engine.requests == []
    assert service.admission.num_active == 0


async def test_tools_that_make_the_grammar_too_large_are_refused(post, engine, set_reply):
    set_reply(PLAIN_FORMAT)
    values = ["x" * 1000 + str(index) for index in range(200)]
    schema = {"type": "object", "properties": {"a": {"enum": values}}}
    tools = [{"type": "function", "function": {"name": f"f{index}", "parameters": schema}} for index in range(8)]
    response = await post(tools=tools, tool_choice="required")
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert engine.compiled == []


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_during_compilation_frees_everything(url, engine, service, stream):
    engine.compiling_s = 60
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk:
        fields = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "response_format": JSON_SCHEMA}
        request_task = asyncio.create_task(sdk.chat.completions.create(**fields, stream=stream))
        async with asyncio.timeout(30):
            while not engine.num_compiling:
                await asyncio.sleep(0.01)
            assert service.admission.num_active == 1
            request_task.cancel()
            while service.admission.num_active or engine.num_compiling:
                await asyncio.sleep(0.01)
    assert engine.requests == []
    assert not service.running


@pytest.mark.parametrize("burst", [None, 1, 3, 100])
@pytest.mark.parametrize(
    ("opening", "reply", "content"),
    [
        ("", "<think>\nHm.\n</think>\n\n yes", " yes"),
        ("<think>\n", "Hm.\n</think>\n  no\n", "  no\n"),
        ("", " yes", " yes"),
        ("<think>\n\n</think>\n\n", "<think>", "<think>"),
    ],
)
async def test_content_is_one_of_the_choices(post, engine, set_reply, opening, reply, content, burst):
    set_reply(THINKING_FORMAT, reply)
    fields = {"structured_outputs": {"choice": [" yes", "  no\n", "<think>"]}}
    fields["chat_template_kwargs"] = {"opening": opening}
    if burst is None:
        message = (await (await post(**fields)).get_json())["choices"][0]["message"]
        assert message["content"] == content
        return
    engine.burst = burst
    events = parse_events(await (await post(**fields, stream=True)).get_data())
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == content


@pytest.mark.parametrize("stream", [False, True])
async def test_grammar_that_fails_later_is_a_400_of_its_field(post, engine, service, stream):
    engine.endless = True
    engine.delay = 0.01
    request_task = asyncio.create_task(post(structured_outputs={"regex": "x+"}, stream=stream, n=2))
    async with asyncio.timeout(30):
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
    if stream:
        # The stream begins with the first token, after `engine.delay`. An earlier failure would be a 400.
        await asyncio.sleep(10 * engine.delay)
    engine.refuse_grammar(engine.keys[1], "it takes too long to follow")
    response = await request_task
    if stream:
        data = await response.get_data()
        assert b"\n\nevent: error\n" in data
        error = parse_events(data)[-1]["error"]
    else:
        assert response.status_code == 400
        error = (await response.get_json())["error"]
    assert (error["param"], error["code"]) == ("structured_outputs.regex", "invalid_grammar")
    async with asyncio.timeout(30):
        while engine.num_active > 1 or service.admission.num_active:
            await asyncio.sleep(0.01)
