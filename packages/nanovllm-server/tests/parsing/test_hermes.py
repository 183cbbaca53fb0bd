import pytest

from nanovllm_models.chat_formats import HERMES, THINK, ChatFormat

FORM = ChatFormat(THINK, HERMES)
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
CALLED = ("get_weather", PARIS)

# Cases by name: (text, reasoning, content, calls).
CASES = {
    "nothing": ("", "", "", []),
    "plain text": ("Hello there!", "", "Hello there!", []),
    "plain text keeps its whitespace": ("\n  Hello \n", "", "\n  Hello \n", []),
    "only whitespace": (" \n", "", " \n", []),
    "reasoning, then content": ("<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "reasoning that is empty": ("<think>\n\n</think>\n\nHello.", "", "Hello.", []),
    "reasoning of several lines": ("<think>\na\n\n  b \n</think>\n\nc", "a\n\n  b", "c", []),
    "reasoning without line breaks": ("<think>Hm.</think>Hello.", "Hm.", "Hello.", []),
    "whitespace before reasoning": ("\n<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "reasoning that has no end": ("<think>\nHm, let me", "Hm, let me", "", []),
    "reasoning that ends in half a tag": ("<think>\nHm.\n</thi", "Hm.\n</thi", "", []),
    "reasoning with other tags": ("<think>\n<b>x</b> < y </thin>\n</think>\nz", "<b>x</b> < y </thin>", "z", []),
    "a second opening tag in reasoning": ("<think>\na <think> b\n</think>\nc", "a <think> b", "c", []),
    "half a tag as content": ("<thin", "", "<thin", []),
    "the tag further on is content": ("Write <think> here.", "", "Write <think> here.", []),
    "a lone end tag is content": ("a</think>b", "", "a</think>b", []),
    "a second end tag is content": ("<think>a</think>b</think>c", "a", "b</think>c", []),
    "nothing after reasoning": ("<think>\nHm.\n</think>\n\n", "Hm.", "", []),
    "one call": (CALL, "", "", [CALLED]),
    "reasoning, then a call": (f"<think>\nHm.\n</think>\n\n{CALL}", "Hm.", "", [CALLED]),
    "text before a call": (f"I'll look.\n{CALL}", "", "I'll look.", [CALLED]),
    "text after a call": (f"{CALL}\nDone.", "", "Done.", [CALLED]),
    "text around calls": (f"One.\n{CALL}\nTwo.\n{CALL}\nThree.", "", "One.\nTwo.\nThree.", [CALLED, CALLED]),
    "several calls": (f"{CALL}\n{CALL}\n{CALL}\n", "", "", [CALLED] * 3),
    "calls that touch": (f"a{CALL}{CALL}b", "", "ab", [CALLED] * 2),
    "two calls in one pair of tags": (
        '<tool_call>\n{"name": "ping", "arguments": {}}\n{"name": "ping", "arguments": {"a": 1}}\n</tool_call>',
        "",
        "",
        [("ping", "{}"), ("ping", '{"a": 1}')],
    ),
    "no line breaks": ('<tool_call>{"name":"ping","arguments":{"a":1}}</tool_call>', "", "", [("ping", '{"a":1}')]),
    "line breaks within": (
        '<tool_call>\n{\n  "name" : "ping",\n  "arguments" : {\n    "a": 1\n  }\n}\n</tool_call>',
        "",
        "",
        [("ping", '{\n    "a": 1\n  }')],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"a": [1, {}]}, "name": "ping"}</tool_call>',
        "",
        "",
        [("ping", '{"a": [1, {}]}')],
    ),
    "parameters for arguments": ('<tool_call>{"name": "ping", "parameters": {}}</tool_call>', "", "", [("ping", "{}")]),
    "no arguments": ('<tool_call>{"name": "ping"}</tool_call>', "", "", [("ping", "{}")]),
    "null for arguments": ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', "", "", [("ping", "{}")]),
    "an empty string for arguments": (
        '<tool_call>{"name": "ping", "arguments": ""}</tool_call>',
        "",
        "",
        [("ping", "{}")],
    ),
    "null as a string for arguments": (
        r'<tool_call>{"arguments": " null\n", "name": "ping"}</tool_call>',
        "",
        "",
        [("ping", "{}")],
    ),
    "a string of text for arguments": (
        '<tool_call>{"name": "ping", "arguments": "now"}</tool_call>',
        "",
        '<tool_call>{"name": "ping", "arguments": "now"}</tool_call>',
        [],
    ),
    "arguments as a string": (
        r'<tool_call>{"name": "ping", "arguments": "{\"a\": \"\\n\"}"}</tool_call>',
        "",
        "",
        [("ping", r'{"a": "\n"}')],
    ),
    "other fields before and after": (
        '<tool_call>{"id": "7", "name": "ping", "arguments": {}, "more": [1, "}"], "x": null}</tool_call>',
        "",
        "",
        [("ping", "{}")],
    ),
    "an unknown function": ('<tool_call>{"name": "no", "arguments": {}}</tool_call>', "", "", [("no", "{}")]),
    "a name with escapes": (r'<tool_call>{"name": "p\u0069ng", "arguments": {}}</tool_call>', "", "", [("ping", "{}")]),
    "nested arguments": (
        '<tool_call>{"name": "ping", "arguments": {"a": {"b": [{"c": {}}, []]}}}</tool_call>',
        "",
        "",
        [("ping", '{"a": {"b": [{"c": {}}, []]}}')],
    ),
    "brackets and tags in strings": (
        r'<tool_call>{"name": "ping", "arguments": {"a": "}] </tool_call> \" { \\"}}</tool_call>.',
        "",
        ".",
        [("ping", r'{"a": "}] </tool_call> \" { \\"}')],
    ),
    "unicode": (
        '<tool_call>{"name": "ping", "arguments": {"città": "東京 😀", "e": "\\u00e9"}}</tool_call>é',
        "",
        "é",
        [("ping", '{"città": "東京 😀", "e": "\\u00e9"}')],
    ),
    "numbers and words": (
        '<tool_call>{"name": "ping", "arguments": {"a": -1.5e+3, "b": [true, false, null]}}</tool_call>',
        "",
        "",
        [("ping", '{"a": -1.5e+3, "b": [true, false, null]}')],
    ),
    "a call ends reasoning that has no end": (f"<think>\nHm.\n{CALL}", "Hm.", "", [CALLED]),
    "text after a call that ends reasoning": (f"<think>Hm.\n{CALL}\nSo.", "Hm.", "So.", [CALLED]),
    "reasoning that goes on after a call": (
        f"<think>\nMaybe {CALL} but rather not.\n</think>\n\nHello",
        "Maybe but rather not.",
        "Hello",
        [CALLED],
    ),
    "reasoning that begins with a call": (f"<think>\n{CALL}\nNo.\n</think>\n\nHello", "No.", "Hello", [CALLED]),
    "an end tag right after a call in reasoning": (f"<think>\nHm.\n{CALL}\n</think>\n\nHi", "Hm.", "Hi", [CALLED]),
    "a call after reasoning that goes on": (
        f"<think>\nHm {CALL} no.\n</think>\n\nHi\n{CALL}",
        "Hm no.",
        "Hi",
        [CALLED, CALLED],
    ),
    "two calls and text in reasoning": (
        f"<think>\na {CALL} b {CALL} c\n</think>\n\nHello",
        "a c",
        "b\n\nHello",
        [CALLED, CALLED],
    ),
    "a tag that begins no call after a call in reasoning": (
        f"<think>\na {CALL} b <tool_call> c\n</think>\n\nHello",
        "a b <tool_call> c",
        "Hello",
        [CALLED],
    ),
    "an end tag after reasoning that goes on": (
        f"<think>a {CALL} b</think>c</think>d",
        "a b",
        "c</think>d",
        [CALLED],
    ),
    "a tag that begins no call in reasoning": (
        f"<think>I use <tool_call> now. <tool_call>{{}}\n</think>\n{CALL}",
        "I use <tool_call> now. <tool_call>{}",
        "",
        [CALLED],
    ),
    "no JSON": ("<tool_call>\nlook it up\n</tool_call>", "", "<tool_call>\nlook it up\n</tool_call>", []),
    "an empty call": ("<tool_call></tool_call>", "", "<tool_call></tool_call>", []),
    "an object without a name": ('<tool_call>{"nam": "f"}</tool_call>', "", '<tool_call>{"nam": "f"}</tool_call>', []),
    "an empty name": ('a <tool_call>{"name": ""}', "", 'a <tool_call>{"name": ""}', []),
    "a name that is not a string": ('<tool_call>{"name": 5}', "", '<tool_call>{"name": 5}', []),
    "arguments that are not an object": (
        '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>!',
        "",
        '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>!',
        [],
    ),
    "an array of calls": (
        '<tool_call>[{"name": "ping"}]</tool_call>',
        "",
        '<tool_call>[{"name": "ping"}]</tool_call>',
        [],
    ),
    "Python for JSON": ("<tool_call>{'name': 'ping'}</tool_call>", "", "<tool_call>{'name': 'ping'}</tool_call>", []),
    "a call after a tag without a call": (f"<tool_call>\nno\n{CALL}", "", "<tool_call>\nno", [CALLED]),
    "a tag, and then a call": (f"<tool_call>\n{CALL}", "", "<tool_call>", [CALLED]),
    "a call, and a tag without a call": (
        f"{CALL}\n<tool_call>no</tool_call>",
        "",
        "<tool_call>no</tool_call>",
        [CALLED],
    ),
    "no end tag": ('<tool_call>\n{"name": "ping", "arguments": {}}', "", "", [("ping", "{}")]),
    "no end tag, but text": ('<tool_call>{"name": "ping", "arguments": {}}\nok', "", "ok", [("ping", "{}")]),
    "no last brace": ('<tool_call>{"name": "ping", "arguments": {}\n</tool_call>', "", "", [("ping", "{}")]),
    "one brace too many": (
        '<tool_call>{"name": "ping", "arguments": {}}}</tool_call>',
        "",
        "",
        [("ping", "{}")],
    ),
    "arguments that are not quite JSON": (
        '<tool_call>{"name": "ping", "arguments": {a: True, \'b\': None}}</tool_call>',
        "",
        "",
        [("ping", "{a: True, 'b': None}")],
    ),
    "arguments that stop being JSON": (
        '<tool_call>{"name": "ping", "arguments": {"a": 1\n</tool_call>ok',
        "",
        "ok",
        [("ping", '{"a": 1\n')],
    ),
    "cut off in the tag": ("ok <tool_ca", "", "ok <tool_ca", []),
    "cut off after the tag": ("ok\n<tool_call>\n", "", "ok\n<tool_call>\n", []),
    "cut off in the name": ('<tool_call>\n{"name": "pi', "", '<tool_call>\n{"name": "pi', []),
    "cut off after the name": ('<tool_call>\n{"name": "ping"', "", "", [("ping", "", "cut")]),
    "cut off before the arguments": ('<tool_call>\n{"name": "ping", "argum', "", "", [("ping", "", "cut")]),
    "cut off in the arguments": (
        '<tool_call>{"name": "ping", "arguments": {"a": "b',
        "",
        "",
        [("ping", '{"a": "b', "cut")],
    ),
    "cut off in the second call": (
        f'x\n{CALL}\n<tool_call>{{"name": "ping", "arguments": {{"a": [',
        "",
        "x",
        [CALLED, ("ping", '{"a": [', "cut")],
    ),
    "cut off in the end tag": ('<tool_call>{"name": "ping", "arguments": {}}\n</tool_c', "", "", [("ping", "{}")]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hermes_answers_are_parsed(check, case):
    check(FORM, *case)


BEGUN = {
    "reasoning, then content": ("Hm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "no end": ("Hm.\nHello.", "Hm.\nHello.", "", []),
    "nothing": ("", "", "", []),
    "ended at once": ("</think>\n\nHello.", "", "Hello.", []),
    "begun again": ("<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "whitespace alone": ("\n\n", "", "", []),
    "a call": (f"Hm.\n</think>\n\n{CALL}", "Hm.", "", [CALLED]),
    "a call without the end": (f"Hm.\n\n{CALL}\n{CALL}", "Hm.", "", [CALLED, CALLED]),
    "a call at once": (CALL, "", "", [CALLED]),
}


@pytest.mark.parametrize("case", BEGUN.values(), ids=BEGUN)
def test_reasoning_begun_by_the_prompt_is_parsed(check, case):
    check(FORM, *case, starts_in_reasoning=True)


def test_without_tools_a_call_is_text(check):
    check(FORM, f"<think>\nHm.\n</think>\n\n{CALL}\n", "Hm.", f"{CALL}\n", tools=None)
    check(FORM, f"<think>\nHm.\n{CALL}\n", f"Hm.\n{CALL}\n", tools=None)


def test_without_reasoning_its_tags_are_text(check):
    form = ChatFormat(None, HERMES)
    check(form, f"<think>a</think>\n{CALL}", "", "<think>a</think>", [CALLED])


CONSTRAINED = {
    "whitespace of the content": ("<think>\nHm.\n</think>\n\n yes ", "Hm.", " yes ", []),
    "one line break": ("<think>\nHm.\n</think>\n\tyes", "Hm.", "\tyes", []),
    "no line break": ("<think>\nHm.\n</think>  yes", "Hm.", "  yes", []),
    "a third line break": ("<think>\nHm.\n</think>\n\n\nyes", "Hm.", "\nyes", []),
    "only whitespace as content": ("<think>\nHm.\n</think>\n\n \n", "Hm.", " \n", []),
    "nothing after reasoning": ("<think>\nHm.\n</think>\n\n", "Hm.", "", []),
    "no reasoning": ("\n\n yes", "", "\n\n yes", []),
    "a tag after whitespace": (" <think>yes</think>", "", " <think>yes</think>", []),
    "a call": (f"<think>\nHm.\n</think>\n\n{CALL}\n", "Hm.", "", [CALLED]),
}


@pytest.mark.parametrize("case", CONSTRAINED.values(), ids=CONSTRAINED)
def test_constrained_content_keeps_its_whitespace(check, case):
    check(FORM, *case, is_content_constrained=True)
