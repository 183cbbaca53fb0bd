import pytest

from nanovllm_models.chat_formats import QWEN3_CODER, THINK, ChatFormat

FORM = ChatFormat(THINK, QWEN3_CODER)
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
CALLED = ("get_weather", '{"city": "Paris", "days": 3}')
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"


def search(key, value):
    return f"<tool_call>\n<function=search>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


# Cases by name: (text, reasoning, content, calls).
CASES = {
    "plain text": ("Use a < b > c.\n", "", "Use a < b > c.\n", []),
    "reasoning, then content": ("<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "reasoning, then a call": (f"<think>\nHm.\n</think>\n\n{CALL}", "Hm.", "", [CALLED]),
    "a call ends reasoning": (f"<think>\nHm.\n{CALL}", "Hm.", "", [CALLED]),
    "one call": (CALL, "", "", [CALLED]),
    "several calls": (f"{CALL}\n{CALL}\n", "", "", [CALLED, CALLED]),
    "two calls in one pair of tags": (
        "<tool_call><function=ping></function>\n<function=ping></function></tool_call>",
        "",
        "",
        [("ping", "{}"), ("ping", "{}")],
    ),
    "text around calls": (f"One.\n\n{CALL}\nTwo.\n{PING}\n3", "", "One.\nTwo.\n3", [CALLED, ("ping", "{}")]),
    "no parameters": (PING, "", "", [("ping", "{}")]),
    "no line breaks": (
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        "",
        "",
        [("get_weather", '{"city": "Paris"}')],
    ),
    "a value of several lines": (search("query", "a\n\n b\n"), "", "", [("search", r'{"query": "a\n\n b\n"}')]),
    "an empty value": (search("query", ""), "", "", [("search", r'{"query": ""}')]),
    "a string that looks like a number": (search("query", "5"), "", "", [("search", '{"query": "5"}')]),
    "a string that looks like JSON": (search("query", '{"a": 1}'), "", "", [("search", r'{"query": "{\"a\": 1}"}')]),
    "a string of tags": (
        search("query", "<b> </function> <parameter=x> &amp; </b>"),
        "",
        "",
        [("search", '{"query": "<b> </function> <parameter=x> &amp; </b>"}')],
    ),
    "a forgotten end of a value": (
        CALL.replace("\n</parameter>", "", 1),
        "",
        "",
        [CALLED],
    ),
    "a forgotten end of a value, without line breaks": (
        "<tool_call><function=get_weather><parameter=city>Paris<parameter=days>3</parameter></function></tool_call>",
        "",
        "",
        [CALLED],
    ),
    "a forgotten end of an empty value": (
        "<tool_call><function=get_weather><parameter=city>\n<parameter=days>\n3\n</parameter></function></tool_call>",
        "",
        "",
        [("get_weather", '{"city": "", "days": 3}')],
    ),
    "a forgotten end of a value, then cut off": (
        "<tool_call><function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3",
        "",
        "",
        [("get_weather", '{"city": "Paris"', "cut")],
    ),
    "a string with the tag of its own parameter": (
        search("query", "<parameter=query>"),
        "",
        "",
        [("search", '{"query": "<parameter=query>"}')],
    ),
    "a string with a part of a tag": (
        search("query", "\n<parameter=\nlimit"),
        "",
        "",
        [("search", r'{"query": "\n<parameter=\nlimit"}')],
    ),
    "quotes, backslashes, unicode": (search("query", '"\\ é😀\t'), "", "", [("search", r'{"query": "\"\\ é😀\t"}')]),
    "an integer": (search("limit", "-5"), "", "", [("search", '{"limit": -5}')]),
    "an integer that is null": (search("limit", "null"), "", "", [("search", '{"limit": null}')]),
    "an integer that is None": (search("limit", "None"), "", "", [("search", '{"limit": null}')]),
    "an integer parameter with a value that is not an integer": (
        search("limit", "many"),
        "",
        "",
        [("search", '{"limit": "many"}')],
    ),
    "a number": (search("ratio", "1.50"), "", "", [("search", '{"ratio": 1.50}')]),
    "a number that is not finite": (search("ratio", "NaN"), "", "", [("search", '{"ratio": "NaN"}')]),
    "true": (search("exact", "true"), "", "", [("search", '{"exact": true}')]),
    "True": (search("exact", "True"), "", "", [("search", '{"exact": true}')]),
    "a boolean parameter with a value that is not a boolean": (
        search("exact", "yes"),
        "",
        "",
        [("search", '{"exact": "yes"}')],
    ),
    "an array": (search("tags", '["a", "b"]'), "", "", [("search", '{"tags": ["a", "b"]}')]),
    "an array over several lines": (search("tags", '[\n "a"\n]'), "", "", [("search", '{"tags": [\n "a"\n]}')]),
    "an array parameter with a value that is not an array": (
        search("tags", "['a']"),
        "",
        "",
        [("search", '{"tags": "[\'a\']"}')],
    ),
    "an object": (search("filter", '{"a": {"b": []}}'), "", "", [("search", '{"filter": {"a": {"b": []}}}')]),
    "an object cut short": (search("filter", '{"a": '), "", "", [("search", r'{"filter": "{\"a\": "}')]),
    "a string or null, a string": (search("note", "x"), "", "", [("search", '{"note": "x"}')]),
    "a string or null, null": (search("note", "null"), "", "", [("search", '{"note": null}')]),
    "a string or null by anyOf": (search("since", "2026"), "", "", [("search", '{"since": "2026"}')]),
    "one of some strings": (search("kind", "web"), "", "", [("search", '{"kind": "web"}')]),
    "one of some values": (search("level", "2.5"), "", "", [("search", '{"level": 2.5}')]),
    "one of some values, null": (search("level", "None"), "", "", [("search", '{"level": null}')]),
    "a value outside an enum": (search("level", "high"), "", "", [("search", '{"level": "high"}')]),
    "a constant": (search("fixed", "True"), "", "", [("search", '{"fixed": true}')]),
    "one of some strings, by reference": (search("order", "1"), "", "", [("search", '{"order": "1"}')]),
    "a reference to itself": (search("loop", "1"), "", "", [("search", '{"loop": 1}')]),
    "a parameter without a schema": (search("other", "[1]"), "", "", [("search", '{"other": "[1]"}')]),
    "a parameter without a schema, text": (search("other", "a b"), "", "", [("search", '{"other": "a b"}')]),
    "a function without a schema": (
        "<tool_call><function=ping><parameter=a>1</parameter><parameter=b>x</parameter></function></tool_call>",
        "",
        "",
        [("ping", '{"a": "1", "b": "x"}')],
    ),
    "an unknown function": (
        "<tool_call><function=no><parameter=a>1</parameter></function></tool_call>",
        "",
        "",
        [("no", '{"a": "1"}')],
    ),
    "a key with quotes": (search('a"b', "1"), "", "", [("search", r'{"a\"b": "1"}')]),
    "no outer tags": (
        "I call.\n<function=ping>\n<parameter=a>\n1\n</parameter>\n</function>\nok",
        "",
        "I call.\nok",
        [("ping", '{"a": "1"}')],
    ),
    "no opening tag": ("<function=ping></function>\n</tool_call>", "", "", [("ping", "{}")]),
    "no outer tags and no such function": ("<function=no></function>", "", "<function=no></function>", []),
    "no function": ("<tool_call>\nlook\n</tool_call>", "", "<tool_call>\nlook\n</tool_call>", []),
    "JSON for elements": (
        '<tool_call>\n{"name": "ping"}\n</tool_call>',
        "",
        '<tool_call>\n{"name": "ping"}\n</tool_call>',
        [],
    ),
    "an empty name": ("<tool_call><function=></function>", "", "<tool_call><function=></function>", []),
    "a name over two lines": ("<tool_call><function=a\nb></function>", "", "<tool_call><function=a\nb></function>", []),
    "text for parameters": (
        "<tool_call><function=ping>now</function></tool_call>",
        "",
        "<tool_call><function=ping>now</function></tool_call>",
        [],
    ),
    "text after a parameter": (
        "<tool_call><function=ping><parameter=a>1</parameter> and</function></tool_call>",
        "",
        "and</function></tool_call>",
        [("ping", '{"a": "1"}')],
    ),
    "no closing function": (
        "<tool_call><function=ping><parameter=a>1</parameter></tool_call>ok",
        "",
        "ok",
        [("ping", '{"a": "1"}')],
    ),
    "a broken key": (
        "<tool_call><function=ping><parameter=a>1</parameter><parameter=b\n></function>",
        "",
        "<parameter=b\n></function>",
        [("ping", '{"a": "1"}')],
    ),
    "a call after an opening tag without a call": (f"<tool_call>no\n{CALL}", "", "<tool_call>no", [CALLED]),
    "cut off in the tag": ("ok <function", "", "ok <function", []),
    "cut off in the name": ("<tool_call>\n<function=pi", "", "<tool_call>\n<function=pi", []),
    "cut off after the name": ("<tool_call>\n<function=ping>\n", "", "", [("ping", "", "cut")]),
    "cut off in a key": ("<tool_call>\n<function=ping>\n<parameter=a", "", "", [("ping", "", "cut")]),
    "cut off in a value": ("<tool_call><function=ping><parameter=a>\n12", "", "", [("ping", "", "cut")]),
    "cut off in the second key": (
        "<tool_call><function=ping><parameter=a>1</parameter>\n<parameter=b",
        "",
        "",
        [("ping", '{"a": "1"', "cut")],
    ),
    "cut off in the second value": (
        "<tool_call><function=ping><parameter=a>1</parameter>\n<parameter=b>\nx\n</param",
        "",
        "",
        [("ping", '{"a": "1"', "cut")],
    ),
    "cut off after a value": (
        "<tool_call><function=ping><parameter=a>1</parameter>\n",
        "",
        "",
        [("ping", '{"a": "1"', "cut")],
    ),
    "cut off in the end": ("<tool_call><function=ping></function>\n</tool", "", "", [("ping", "{}")]),
    "cut off in the function's end": (
        "<tool_call><function=ping><parameter=a>1</parameter></fun",
        "",
        "",
        [("ping", '{"a": "1"', "cut")],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_qwen3_coder_answers_are_parsed(check, case):
    check(FORM, *case)
