"""Rendering adapts roles, tools and calls to the features that the template supports."""

import asyncio
import json
import threading

import pytest
from template_tokenizers import CONVERSATION, TemplateTokenizer, make_strict_template

from nanovllm_models.chat_formats import HERMES, TOOL_CALL_FORMATS, ChatFormat
from nanovllm_models.errors import TemplateError, TemplateValueError
from nanovllm_server.chat.rendering import MIN_LARGE_SIZE, Renderer
from nanovllm_server.parsing.events import CallArguments, CallBegun
from nanovllm_server.parsing.parser import Parser
from nanovllm_server.protocol.body import MAX_VALUES
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.messages import Message, PastToolCall, parse_messages
from nanovllm_server.protocol.template import TemplateOptions

CONVERSATION_WITH_CALLS = (
    Message(role="user", content="hi"),
    Message(
        role="assistant", content=None, tool_calls=(PastToolCall("1", "f", '{"x": 1}'), PastToolCall("2", "g", ""))
    ),
    Message(role="tool", content="4", tool_call_id="1"),
)


class CallTokenizer(TemplateTokenizer):
    def __init__(self, write_call):
        self._write_call = write_call

    def render_chat(self, messages, *, template_values=None, **_):
        try:
            return "".join(map(self._write, messages))
        except (TypeError, AttributeError) as error:
            raise TemplateError(str(error)) from error

    def _write(self, message):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = "".join(f"[{call['name']} {self._write_call(call['arguments'])}]" for call in calls)
        return message["content"] + ";" + written


def write_items(arguments):
    return ",".join(f"{key}={value}" for key, value in arguments.items())


def write_json(arguments):
    return json.dumps(arguments)


def write_text(arguments):
    return arguments + ""


def write_text_or_json(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


@pytest.mark.parametrize(
    ("write_call", "expected"),
    [
        (write_items, "hi;;[f x=1][g ]4;"),
        (write_json, 'hi;;[f {"x": 1}][g {}]4;'),
        (write_text, 'hi;;[f {"x": 1}][g {}]4;'),
        (write_text_or_json, 'hi;;[f {"x": 1}][g {}]4;'),
    ],
)
async def test_call_arguments_are_passed_as_the_template_expects(write_call, expected):
    renderer = Renderer(CallTokenizer(write_call))
    assert (await renderer.render(CONVERSATION_WITH_CALLS)).text == expected
    renderer.close()


@pytest.mark.parametrize("arguments", ["", " \n", "null", " null\n"])
@pytest.mark.parametrize(("write_call", "expected"), [(write_items, ""), (write_json, "{}"), (write_text, "{}")])
async def test_call_without_arguments_has_an_empty_object(write_call, expected, arguments):
    message = Message(role="assistant", content="", tool_calls=(PastToolCall("1", "f", arguments),))
    renderer = Renderer(CallTokenizer(write_call))
    assert (await renderer.render([message])).text == f";[f {expected}]"
    renderer.close()


class SingleCallTokenizer(CallTokenizer):
    """Has a template that refuses messages with several calls, or writes only the first call."""

    def __init__(self, *, refuses):
        super().__init__(write_json)
        self._refuses = refuses

    def _write(self, message):
        calls = message.get("tool_calls", ())
        if len(calls) > 1 and self._refuses:
            raise TypeError("This model only supports single tool-calls at once!")
        reasoning = f"({message['reasoning']})" if "reasoning" in message else ""
        return f"<{message['role']}>{reasoning}" + super()._write({**message, "tool_calls": calls[:1]})


def make_calls(*call_ids):
    return tuple(PastToolCall(call_id, f"f{index}", "") for index, call_id in enumerate(call_ids))


@pytest.mark.parametrize("refuses", [True, False])
@pytest.mark.parametrize(
    ("call_ids", "result_ids", "expected"),
    [
        ("ab", "ab", "f0 result0 f1 result1"),
        ("ab", "ba", "f0 result1 f1 result0"),
        ("aa", "aa", "f0 result0 f1 result1"),
        ([None, None], [None, None], "f0 result0 f1 result1"),
        ("ab", "xy", "f0 result0 f1 result1"),
        ("ab", "bx", "f0 result1 f1 result0"),
        ("abc", "c", "f0 f1 f2 result0"),
        ("ab", "aab", "f0 result0 f1 result2 result1"),
        ("ab", "", "f0 f1"),
    ],
)
async def test_template_for_single_calls_gets_each_call_with_its_result(refuses, call_ids, result_ids, expected):
    messages = (
        *CONVERSATION,
        Message(role="assistant", content="Ok", reasoning="Hm", tool_calls=make_calls(*call_ids)),
        *(
            Message(role="tool", content=f"result{index}", tool_call_id=result_id)
            for index, result_id in enumerate(result_ids)
        ),
        Message(role="user", content="bye"),
    )
    renderer = Renderer(SingleCallTokenizer(refuses=refuses), HERMES)
    text = (await renderer.render(messages)).text
    renderer.close()
    words = [
        f"<tool>{word};" if word.startswith("result") else f"<assistant>;[{word} {{}}]" for word in expected.split()
    ]
    turns = "".join(words).replace("<assistant>;", "<assistant>(Hm)Ok;", 1)
    assert text == f"<system>be brief;<user>hi;{turns}<user>bye;"


async def test_incomplete_call_is_passed_as_text():
    cut_call_message = Message(role="assistant", content="", tool_calls=(PastToolCall("1", "f", '{"x'),))
    renderer = Renderer(CallTokenizer(write_json))
    assert (await renderer.render([cut_call_message])).text == r';[f "{\"x"]'
    renderer.close()


@pytest.mark.parametrize("arguments", ['{"x', "[]", "1", '{"a":' + "[" * 300 + "]" * 300 + "}"])
async def test_template_that_needs_objects_gets_no_other_arguments(arguments):
    calls = [
        {"id": str(index), "type": "function", "function": {"name": "f", "arguments": text}}
        for index, text in enumerate(["{}", arguments])
    ]
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]}
    renderer = Renderer(CallTokenizer(write_items))
    with pytest.raises(ApiError) as refused:
        await renderer.render(parse_messages(FieldReader(body)))
    renderer.close()
    assert (refused.value.status, refused.value.code) == (400, "invalid_value")
    assert refused.value.param == "messages[1].tool_calls[1].function.arguments"
    assert refused.value.message.startswith(f"{refused.value.param} must be a JSON object as text, with at most 100 ")


async def test_error_names_the_deprecated_field_function_call():
    messages = parse_messages(
        FieldReader({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]})
    )
    renderer = Renderer(CallTokenizer(write_items))
    with pytest.raises(ApiError) as refused:
        await renderer.render(messages)
    renderer.close()
    assert refused.value.param == "messages[0].function_call.arguments"


async def test_template_that_leaves_out_other_arguments_still_gets_these():
    renderer = Renderer(CallTokenizer(lambda arguments: write_items(arguments) if isinstance(arguments, dict) else ""))
    cut_call_message = Message(role="assistant", content="", tool_calls=(PastToolCall("1", "f", '{"x'),))
    assert (await renderer.render([cut_call_message])).text == ";[f ]"
    renderer.close()


@pytest.mark.parametrize(
    "arguments",
    ['{"a":' + "[" * 300 + "]" * 300 + "}", '{"a": [' + "[]," * MAX_VALUES + "[]]}"],
    ids=["deep", "many values"],
)
@pytest.mark.parametrize(
    "tokenizer", [CallTokenizer(write_json), TemplateTokenizer(make_strict_template("user", "assistant"))]
)
async def test_arguments_that_are_too_deep_or_too_large_stay_text(arguments, tokenizer):
    message = Message(role="assistant", content="", tool_calls=(PastToolCall("1", "f", arguments),))
    renderer = Renderer(tokenizer, HERMES)
    text = (await renderer.render([message])).text
    assert arguments in text or json.dumps(arguments) in text
    renderer.close()


LONG_INTEGERS = ("123456789012345678901234", "-9999999999999999999", "18446744073709551616", "9" * 300)


@pytest.mark.parametrize("write_call", [write_items, write_json])
async def test_long_integers_of_arguments_keep_their_digits(write_call):
    arguments = f'{{"x": [{", ".join(LONG_INTEGERS)}, 2.5]}}'
    message = Message(role="assistant", content="", tool_calls=(PastToolCall("1", "f", arguments),))
    renderer = Renderer(CallTokenizer(write_call))
    text = (await renderer.render([message])).text
    renderer.close()
    assert f"[{', '.join(LONG_INTEGERS)}, 2.5]" in text


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
async def test_long_integers_of_arguments_keep_their_digits_in_calls_as_text(name):
    arguments = f'{{"x": {LONG_INTEGERS[0]}, "y": [{LONG_INTEGERS[1]}]}}'
    message = Message(role="assistant", content="", tool_calls=(PastToolCall("1", "f", arguments),))
    renderer = Renderer(TemplateTokenizer(make_strict_template("user", "assistant")), TOOL_CALL_FORMATS[name])
    text = (await renderer.render([message])).text
    renderer.close()
    assert LONG_INTEGERS[0] in text
    assert f"[{LONG_INTEGERS[1]}]" in text


async def test_integers_beyond_all_numbers_stay_text():
    arguments = f'{{"x": {"9" * 5000}}}'
    message = Message(role="assistant", content="", tool_calls=(PastToolCall("1", "f", arguments),))
    renderer = Renderer(CallTokenizer(write_json))
    assert json.dumps(arguments) in (await renderer.render([message])).text
    renderer.close()


async def test_large_arguments_do_not_delay_small_requests():
    has_begun, may_end = threading.Event(), threading.Event()

    class BlockingTokenizer(TemplateTokenizer):
        def render_chat(self, messages, *, template_values=None, **_):
            if messages[0]["content"] == "large":
                has_begun.set()
                assert may_end.wait(timeout=60)
            return ""

    renderer = Renderer(BlockingTokenizer(None))
    large = [Message(role="user", content="large")]
    try:
        tasks = [asyncio.create_task(renderer.render(large, num_body_bytes=MIN_LARGE_SIZE)) for _ in range(2)]
        assert await asyncio.to_thread(has_begun.wait, 60)
        assert (await renderer.render(CONVERSATION)).text == ""
    finally:
        may_end.set()
    await asyncio.gather(*tasks)
    renderer.close()


async def test_reserved_template_variable_is_a_400_that_names_the_field():
    class ReservedVariableTokenizer(TemplateTokenizer):
        def render_chat(self, messages, *, template_values=None, **_):
            if template_values:
                raise TemplateValueError("tokenize can't be given to the chat template")
            return ""

    renderer = Renderer(ReservedVariableTokenizer(None))
    with pytest.raises(ApiError) as refused:
        await renderer.render(CONVERSATION, None, TemplateOptions(variables={"tokenize": True}))
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
    renderer.close()


def test_template_that_refuses_every_message_fails_at_start():
    with pytest.raises(TemplateError, match="^set a template that accepts a user message with --chat-template: "):
        Renderer(TemplateTokenizer(make_strict_template()))


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
QUESTION = (Message(role="user", content="hi"),)
CONVERSATION_WITH_CUT_CALL = (
    *QUESTION,
    Message(
        role="assistant",
        content=None,
        tool_calls=(PastToolCall("1", "look", '{"x": "y"}'), PastToolCall("2", "f", "{")),
    ),
    Message(role="tool", content="4", tool_call_id="1"),
    Message(role="tool", content="5", tool_call_id="2"),
)


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("system", [None, "Be brief."])
async def test_tools_become_text_if_the_template_shows_none(name, system):
    form = TOOL_CALL_FORMATS[name]
    renderer = Renderer(TemplateTokenizer(lambda role, content: f"<{role}>{content}"), form)
    system_messages = () if system is None else (Message(role="system", content=system),)
    text = (await renderer.render((*system_messages, *QUESTION), [TOOL])).text
    assert text.startswith(f"<system>{'' if system is None else 'Be brief.' + chr(10) * 2}You may call")
    assert text.endswith("<user>hi")
    assert text.count("<system>") == 1
    assert '{"name":"look","parameters":{"type":"object"}}' in text
    parser = Parser(ChatFormat(None, form), tools={"NAME": None})
    example = text.partition("parameters:\n")[2].removesuffix("<user>hi")
    assert CallBegun(0, "NAME") in [*parser.push(example), *parser.finish()]
    assert (await renderer.render((*system_messages, *QUESTION))).text.endswith("<user>hi")
    renderer.close()


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
async def test_earlier_calls_become_text_if_the_template_shows_none(name):
    form = TOOL_CALL_FORMATS[name]
    renderer = Renderer(TemplateTokenizer(make_strict_template("system", "user", "assistant")), form)
    text = (await renderer.render(CONVERSATION_WITH_CUT_CALL)).text
    answer = text.removeprefix("<user>hi<assistant>").partition("<user>")[0]
    parser = Parser(ChatFormat(None, form), tools={"look": None, "f": None})
    events = [*parser.push(answer), *parser.finish()]
    assert next(event.name for event in events if isinstance(event, CallBegun)) == "look"
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == 0)
    assert json.loads(arguments) == {"x": "y"}
    assert text.endswith("<user><tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>")
    renderer.close()


async def test_tools_are_passed_to_a_template_that_shows_them():
    class ToolTokenizer(CallTokenizer):
        def render_chat(self, messages, *, tools=None, **_):
            return super().render_chat(messages) + json.dumps(tools)

    renderer = Renderer(ToolTokenizer(write_json), HERMES)
    assert (await renderer.render(QUESTION, [TOOL])).text == "hi;" + json.dumps([TOOL])
    assert (await renderer.render(CONVERSATION_WITH_CUT_CALL)).text.startswith('hi;;[look {"x": "y"}]')
    renderer.close()


async def test_encoder_gets_max_tokens_as_the_limit_of_cached_tokens():
    limits = []

    class RecordingTokenizer(TemplateTokenizer):
        def encode(self, text, *, add_special_tokens, max_cached_tokens=None):
            limits.append(max_cached_tokens)
            return super().encode(text, add_special_tokens=add_special_tokens)

        def min_num_tokens(self, text):
            return 0

    renderer = Renderer(RecordingTokenizer(lambda role, content: content))
    await renderer.render(QUESTION, max_tokens=100)
    assert limits == [100]
    renderer.close()


async def test_extend_appends_text_to_a_prompt():
    renderer = Renderer(TemplateTokenizer(lambda role, content: content))
    prompt = await renderer.extend(await renderer.render(QUESTION), "\n<think>")
    assert prompt.text == "hi\n<think>"
    assert prompt.token_ids.tolist() == [ord(character) for character in prompt.text]
    renderer.close()
