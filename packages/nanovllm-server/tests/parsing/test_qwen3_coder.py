import pytest

from nanovllm_models.chat_formats import QWEN3_CODER, THINK, ChatFormat

FORM = ChatFormat(THINK, QWEN3_CODER)
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
CALLED = ("get_weather", '{"city": "Paris", "days": 3}')
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
UNCLOSED_CALL = CALL.replace("</parameter>\n</function>", "</function>")


def search_call_text(key, value):
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
    "a value of several lines": (
        search_call_text("query", "a\n\n b\n"),
        "",
        "",
        [("search", r'{"query": "a\n\n b\n"}')],
    ),
    "an empty value": (search_call_text("query", ""), "", "", [("search", r'{"query": ""}')]),
    "a string that looks like a number": (search_call_text("query", "5"), "", "", [("search", '{"query": "5"}')]),
    "a string that looks like JSON": (
        search_call_text("query", '{"a": 1}'),
        "",
        "",
        [("search", r'{"query": "{\"a\": 1}"}')],
    ),
    "a string of tags": (
        search_call_text("query", "<b> </function> <parameter=x> &amp; </b>"),
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
    "a forgotten end of the last value": (f"{CALL}\n{UNCLOSED_CALL}\n", "", "", [CALLED, CALLED]),
    "a forgotten end of the last value, then another call": (
        f"{UNCLOSED_CALL}\n{CALL}\nDone.",
        "",
        "Done.",
        [CALLED, CALLED],
    ),
    "a forgotten end of the last value, then a call without parameters": (
        f"{UNCLOSED_CALL}\n{PING}",
        "",
        "",
        [CALLED, ("ping", "{}")],
    ),
    "a forgotten end of the last value, then a call in the same pair of tags": (
        UNCLOSED_CALL.replace("</tool_call>", "<function=ping></function>\n</tool_call>"),
        "",
        "",
        [CALLED, ("ping", "{}")],
    ),
    "forgotten ends of the last values of several calls": (
        f"{UNCLOSED_CALL}{UNCLOSED_CALL}{UNCLOSED_CALL}",
        "",
        "",
        [CALLED, CALLED, CALLED],
    ),
    "a forgotten end of the last value, then a call that is cut off": (
        f"{UNCLOSED_CALL}\n{CALL[:60]}",
        "",
        "",
        [CALLED, ("get_weather", "", "cut")],
    ),
    "a string of tags and a call of another function": (
        search_call_text("query", "</function>\n</tool_call>\n<tool_call>\n<function=no>"),
        "",
        "",
        [("search", r'{"query": "</function>\n</tool_call>\n<tool_call>\n<function=no>"}')],
    ),
    "a forgotten end of the last value, then cut off": (UNCLOSED_CALL.removesuffix("call>"), "", "", [CALLED]),
    "a string with the tag of its own parameter": (
        search_call_text("query", "<parameter=query>"),
        "",
        "",
        [("search", '{"query": "<parameter=query>"}')],
    ),
    "a string with a part of a tag": (
        search_call_text("query", "\n<parameter=\nlimit"),
        "",
        "",
        [("search", r'{"query": "\n<parameter=\nlimit"}')],
    ),
    "quotes, backslashes, unicode": (
        search_call_text("query", '"\\ é😀\t'),
        "",
        "",
        [("search", r'{"query": "\"\\ é😀\t"}')],
    ),
    "an integer": (search_call_text("limit", "-5"), "", "", [("search", '{"limit": -5}')]),
    "an integer that is null": (search_call_text("limit", "null"), "", "", [("search", '{"limit": null}')]),
    "an integer that is None": (search_call_text("limit", "None"), "", "", [("search", '{"limit": null}')]),
    "an integer parameter with a value that is not an integer": (
        search_call_text("limit", "many"),
        "",
        "",
        [("search", '{"limit": "many"}')],
    ),
    "a number": (search_call_text("ratio", "1.50"), "", "", [("search", '{"ratio": 1.50}')]),
    "a number that is not finite": (search_call_text("ratio", "NaN"), "", "", [("search", '{"ratio": "NaN"}')]),
    "true": (search_call_text("exact", "true"), "", "", [("search", '{"exact": true}')]),
    "True": (search_call_text("exact", "True"), "", "", [("search", '{"exact": true}')]),
    "a boolean parameter with a value that is not a boolean": (
        search_call_text("exact", "yes"),
        "",
        "",
        [("search", '{"exact": "yes"}')],
    ),
    "an array": (search_call_text("tags", '["a", "b"]'), "", "", [("search", '{"tags": ["a", "b"]}')]),
    "an array over several lines": (
        search_call_text("tags", '[\n "a"\n]'),
        "",
        "",
        [("search", '{"tags": [\n "a"\n]}')],
    ),
    "an array parameter with a value that is not an array": (
        search_call_text("tags", "['a']"),
        "",
        "",
        [("search", '{"tags": "[\'a\']"}')],
    ),
    "an object": (search_call_text("filter", '{"a": {"b": []}}'), "", "", [("search", '{"filter": {"a": {"b": []}}}')]),
    "an object cut short": (search_call_text("filter", '{"a": '), "", "", [("search", r'{"filter": "{\"a\": "}')]),
    "a string or null, a string": (search_call_text("note", "x"), "", "", [("search", '{"note": "x"}')]),
    "a string or null, null": (search_call_text("note", "null"), "", "", [("search", '{"note": null}')]),
    "a string or null by anyOf": (search_call_text("since", "2026"), "", "", [("search", '{"since": "2026"}')]),
    "one of some strings": (search_call_text("kind", "web"), "", "", [("search", '{"kind": "web"}')]),
    "one of some values": (search_call_text("level", "2.5"), "", "", [("search", '{"level": 2.5}')]),
    "one of some values, null": (search_call_text("level", "None"), "", "", [("search", '{"level": null}')]),
    "a value outside an enum": (search_call_text("level", "high"), "", "", [("search", '{"level": "high"}')]),
    "a constant": (search_call_text("fixed", "True"), "", "", [("search", '{"fixed": true}')]),
    "one of some strings, by reference": (search_call_text("order", "1"), "", "", [("search", '{"order": "1"}')]),
    "a reference to itself": (search_call_text("loop", "1"), "", "", [("search", '{"loop": 1}')]),
    "a parameter without a schema": (search_call_text("other", "[1]"), "", "", [("search", '{"other": "[1]"}')]),
    "a parameter without a schema, text": (search_call_text("other", "a b"), "", "", [("search", '{"other": "a b"}')]),
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
    "a key with quotes": (search_call_text('a"b', "1"), "", "", [("search", r'{"a\"b": "1"}')]),
    "no outer tags": (
        "I call.\n<function=ping>\n<parameter=a>\n1\n</parameter>\n</function>\nok",
        "",
        "I call.\nok",
        [("ping", '{"a": "1"}')],
    ),
    "no opening tag": ("<function=ping></function>\n</tool_call>", "", "", [("ping", "{}")]),
    "no outer tags and no such function": ("<function=no></function>", "", "<function=no></function>", []),
    "no function": ("<tool_call>\nlook\n</tool_call>", "", "<tool_call>\nlook\n</tool_call>", []),
    "JSON instead of elements": (
        '<tool_call>\n{"name": "ping"}\n</tool_call>',
        "",
        '<tool_call>\n{"name": "ping"}\n</tool_call>',
        [],
    ),
    "an empty name": ("<tool_call><function=></function>", "", "<tool_call><function=></function>", []),
    "a name over two lines": ("<tool_call><function=a\nb></function>", "", "<tool_call><function=a\nb></function>", []),
    "text instead of parameters": (
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
