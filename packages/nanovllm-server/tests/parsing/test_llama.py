import pytest

from nanovllm_models.chat_formats import LLAMA, THINK, ChatFormat

FORM = ChatFormat(None, LLAMA)
PARIS = '{"city": "Paris"}'
CALL = f'{{"name": "get_weather", "parameters": {PARIS}}}'
CALLED = ("get_weather", PARIS)
PING = '{"name": "ping", "parameters": {}}'
PINGED = ("ping", "{}")

# Cases by name: (text, reasoning, content, calls).
CASES = {
    "nothing": ("", "", "", []),
    "plain text": ("Hello.\n", "", "Hello.\n", []),
    "one call": (CALL, "", "", [CALLED]),
    "two calls": (f"{CALL}; {PING}", "", "", [CALLED, PINGED]),
    "three calls": (f"{PING};{PING} ; {CALL}", "", "", [PINGED, PINGED, CALLED]),
    "calls on lines": (f"{PING}\n{CALL}\n", "", "", [PINGED, CALLED]),
    "a semicolon at the end": (f"{PING};", "", "", [PINGED]),
    "a semicolon, then text": (f"{PING}; ok", "", "ok", [PINGED]),
    "a semicolon between texts and a call": (f"a; {PING}; b", "", "a;; b", [PINGED]),
    "the tag": (f"<|python_tag|>{CALL}", "", "", [CALLED]),
    "the tag, and two calls": (f"<|python_tag|>{CALL}; {PING}", "", "", [CALLED, PINGED]),
    "the tag twice": (f"<|python_tag|>{CALL}<|python_tag|>{PING}", "", "", [CALLED, PINGED]),
    "the tag before an unknown function": (
        '<|python_tag|>{"name": "no", "parameters": {}}',
        "",
        "",
        [("no", "{}")],
    ),
    "the tag before a program": ('<|python_tag|>print("{}")', "", '<|python_tag|>print("{}")', []),
    "text before a call": (f"I'll look. {CALL}", "", "I'll look.", [CALLED]),
    "text after a call": (f"{CALL}\n\nDone.", "", "Done.", [CALLED]),
    "text around calls": (f"One.\n{CALL}\nTwo.\n{PING}\nThree.", "", "One.\nTwo.\nThree.", [CALLED, PINGED]),
    "a colon before a call": (f"Call: {PING}", "", "Call:", [PINGED]),
    "arguments for parameters": ('{"name": "ping", "arguments": {"a": 1}}', "", "", [("ping", '{"a": 1}')]),
    "a type": ('{"type": "function", "name": "ping", "parameters": {}}', "", "", [PINGED]),
    "parameters before the name": ('{"parameters": {"a": "}"}, "name": "ping"}', "", "", [("ping", '{"a": "}"}')]),
    "no parameters": ('{"name": "ping"}', "", "", [PINGED]),
    "null for parameters": ('{"name": "ping", "parameters": null}', "", "", [PINGED]),
    "parameters as a string": (r'{"name": "ping", "parameters": "{\"a\": 1}"}', "", "", [("ping", '{"a": 1}')]),
    "line breaks within": ('{\n "name": "ping",\n "parameters": {\n }\n}', "", "", [("ping", "{\n }")]),
    "nested parameters": (
        '{"name": "ping", "parameters": {"a": {"name": "ping", "parameters": {}}}}',
        "",
        "",
        [("ping", '{"a": {"name": "ping", "parameters": {}}}')],
    ),
    "brackets in strings": (
        r'{"name": "ping", "parameters": {"a": "}; {\"name\": \\"}}; b',
        "",
        "b",
        [("ping", r'{"a": "}; {\"name\": \\"}')],
    ),
    "unicode": ('{"name": "ping", "parameters": {"é": "😀"}}é', "", "é", [("ping", '{"é": "😀"}')]),
    "more after the parameters": ('{"name": "ping", "parameters": {}, "id": "}"}.', "", ".", [PINGED]),
    "one brace too few": ('{"name": "ping", "parameters": {}', "", "", [PINGED]),
    "one brace too many": (f"{PING}}}", "", "", [PINGED]),
    "an unknown function": ('{"name": "no", "parameters": {}}', "", '{"name": "no", "parameters": {}}', []),
    "an object that is an answer": (
        '{"name": "Ada", "parameters": {"name": "ping", "parameters": {}}} is it',
        "",
        '{"name": "Ada", "parameters": {"name": "ping", "parameters": {}}} is it',
        [],
    ),
    "a call within an object": (f'{{"calls": [{CALL}]}}', "", f'{{"calls": [{CALL}]}}', []),
    "an object with other fields first": ('{"a": 1, "name": "ping"}', "", '{"a": 1, "name": "ping"}', []),
    "an empty object": ("{}", "", "{}", []),
    "a program": ("int f() { return g({1}); }\n", "", "int f() { return g({1}); }\n", []),
    "a template": ("Dear {{name}}, {", "", "Dear {{name}}, {", []),
    "a call on a line of its own within an open brace": (f"Use {{ so:\n{CALL}", "", "Use { so:", [CALLED]),
    "a call after an object": (f'{{"a": "}}"}} {PING}', "", '{"a": "}"}', [PINGED]),
    "a call after an unclosed string": (f'{{"a: 1\n}} {PING}', "", '{"a: 1\n}', [PINGED]),
    "a list of calls": (f"[{PING}, {PING}]", "", "[,]", [PINGED, PINGED]),
    "parameters that are not an object": (
        '{"name": "ping", "parameters": [1]}',
        "",
        '{"name": "ping", "parameters": [1]}',
        [],
    ),
    "parameters that are not quite JSON": (
        '{"name": "ping", "parameters": {"a": None}}',
        "",
        "",
        [("ping", '{"a": None}')],
    ),
    "parameters that stop": (
        f'{{"name": "ping", "parameters": {{"a": 1; {PING}',
        "",
        "",
        [("ping", '{"a": 1'), PINGED],
    ),
    "a call after an object without a name": (f'{{"parameters": {{}}}} {PING}', "", '{"parameters": {}}', [PINGED]),
    "Python for JSON": ("{'name': 'ping'}", "", "{'name': 'ping'}", []),
    "cut off in the tag": ("<|pyth", "", "<|pyth", []),
    "cut off after the tag": ("ok\n<|python_tag|>", "", "ok\n<|python_tag|>", []),
    "cut off in the name": ('{"name": "pi', "", '{"name": "pi', []),
    "cut off after the name": ('{"name": "ping", ', "", "", [("ping", "", "cut")]),
    "cut off in the parameters": ('{"name": "ping", "parameters": {"a": "', "", "", [("ping", '{"a": "', "cut")]),
    "cut off in the second call": (f"{CALL}; {PING[:-2]}", "", "", [CALLED, ("ping", "{", "cut")]),
    "cut off in the second name": (f'{CALL}; {{"name": "p', "", '{"name": "p', [CALLED]),
    "thinking is content": ("<think>a</think>b", "", "<think>a</think>b", []),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_llama_answers_are_parsed(check, case):
    check(FORM, *case)


def test_objects_inside_an_answer_that_must_not_mix_text_and_calls_are_no_calls(check):
    text = f'{{"calls": [\n{CALL},\n{PING}]}}'
    check(FORM, text, content=text, calls_only_at_start=True, is_content_constrained=True)


# R1-Distill-Llama writes reasoning before calls in Llama's format.
BEGUN = {
    "reasoning, then content": ("Hm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "reasoning, then a call": (f"Hm.\n</think>\n\n{CALL}", "Hm.", "", [CALLED]),
    "a call in reasoning is reasoning": (f"Hm, {CALL}?\n</think>\n\nNo.", f"Hm, {CALL}?", "No.", []),
    "reasoning without end": (f"Hm.\n{CALL}", f"Hm.\n{CALL}", "", []),
}


@pytest.mark.parametrize("case", BEGUN.values(), ids=BEGUN)
def test_reasoning_begun_by_the_prompt_is_parsed(check, case):
    check(ChatFormat(THINK, LLAMA), *case, starts_in_reasoning=True)
