import pytest

from nanovllm_models.chat_formats import DEEPSEEK_R1, THINK, ChatFormat

FORM = ChatFormat(THINK, DEEPSEEK_R1)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def call(arguments, name="ping", kind="function"):
    return f"<｜tool▁call▁begin｜>{kind}<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def block(*calls):
    return BEGIN + "\n".join(calls) + END


def cut_after(text, end):
    return text[: text.rindex(end) + len(end)]


PARIS = '{"city": "Paris"}'
WEATHER = call(PARIS, "get_weather")
CALLED = ("get_weather", PARIS)
PING = call("{}")
PINGED = ("ping", "{}")

# Cases by name: (text, reasoning, content, calls).
BEGUN = {
    "reasoning, then content": ("Hm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "reasoning without end": ("Hm.\n\nHello.", "Hm.\n\nHello.", "", []),
    "reasoning, begun again": ("<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "no reasoning": ("\n</think>\n\nHello.", "", "Hello.", []),
    "a call": (f"Hm.\n</think>\n\n{block(WEATHER)}", "Hm.", "", [CALLED]),
    "text and a call": (f"Hm.\n</think>\n\nLet me look.{block(WEATHER)}", "Hm.", "Let me look.", [CALLED]),
    "a call in reasoning is reasoning": (f"Hm. {block(PING)}", f"Hm. {block(PING)}", "", []),
}

CASES = {
    "nothing": ("", "", "", []),
    "plain text": ("```json\n{}\n```\n", "", "```json\n{}\n```\n", []),
    "reasoning that the answer begins": ("<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "one call": (block(WEATHER), "", "", [CALLED]),
    "two calls": (block(WEATHER, PING), "", "", [CALLED, PINGED]),
    "three calls": (block(PING, WEATHER, PING), "", "", [PINGED, CALLED, PINGED]),
    "two blocks": (block(WEATHER) + block(PING), "", "", [CALLED, PINGED]),
    "text around blocks": (f"1\n{block(PING)}2\n{block(PING)}\n3", "", "12\n3", [PINGED, PINGED]),
    "text after a call": (f"{block(PING)}\nok", "", "ok", [PINGED]),
    "line breaks within the block": (f"{BEGIN}\n{PING}\n{END}", "", "", [PINGED]),
    "nested arguments": (block(call('{"a": {"b": [1, {}]}}')), "", "", [("ping", '{"a": {"b": [1, {}]}}')]),
    "arguments over several lines": (block(call('{\n  "a": 1\n}')), "", "", [("ping", '{\n  "a": 1\n}')]),
    "fences and tags in strings": (
        block(call(r'{"a": "```<｜tool▁call▁end｜>\"}"}')),
        "",
        "",
        [("ping", r'{"a": "```<｜tool▁call▁end｜>\"}"}')],
    ),
    "unicode": (block(call('{"città": "東京 😀"}')), "", "", [("ping", '{"città": "東京 😀"}')]),
    "space around the name": (block(call("{}", " ping ")), "", "", [PINGED]),
    "an unknown function": (block(call("{}", "no")), "", "", [("no", "{}")]),
    "a fence without a language": (block(PING).replace("json", ""), "", "", [PINGED]),
    "no fences": (block(PING.replace("```json", "").replace("```", "")), "", "", [PINGED]),
    "no block": (f"So: {WEATHER}", "", "So:", [CALLED]),
    "an unknown function without a block": (call("{}", "no"), "", call("{}", "no"), []),
    "no end of the call": (
        block(PING.replace("<｜tool▁call▁end｜>", "")),
        "",
        "",
        [PINGED],
    ),
    "no end of the block": (f"{BEGIN}{PING}\nok", "", "ok", [PINGED]),
    "an empty block": (BEGIN + END, "", BEGIN + END, []),
    "text in the block": (f"{BEGIN}now{END}", "", f"{BEGIN}now{END}", []),
    "another kind": (block(call("{}", kind="plugin")), "", block(call("{}", kind="plugin")), []),
    "an empty name": (block(call("{}", "")), "", block(call("{}", "")), []),
    "no arguments": (block(call("")), "", block(call("")), []),
    "an array for arguments": (block(call("[1]")), "", block(call("[1]")), []),
    "text for arguments": (block(call("city: Paris")), "", block(call("city: Paris")), []),
    "arguments that are not quite JSON": (block(call("{'a': True}")), "", "", [("ping", "{'a': True}")]),
    "arguments that stop": (block(call('{"a": 1')), "", "", [("ping", '{"a": 1\n')]),
    "a call after a block without a call": (f"{block('no')}{block(PING)}", "", f"{BEGIN}no{END}", [PINGED]),
    "a call without arguments after a call": (block(PING, call("")), "", call("") + END, [PINGED]),
    "tags of outputs are content": ("<｜tool▁outputs▁begin｜>", "", "<｜tool▁outputs▁begin｜>", []),
    "a separator alone is content": ("a<｜tool▁sep｜>b", "", "a<｜tool▁sep｜>b", []),
    "cut off in the tag": ("ok <｜tool▁ca", "", "ok <｜tool▁ca", []),
    "cut off in the kind": (cut_after(block(PING), "func"), "", cut_after(block(PING), "func"), []),
    "cut off in the name": (cut_after(block(PING), "pin"), "", cut_after(block(PING), "pin"), []),
    "cut off after the name": (cut_after(block(PING), "ping\n"), "", "", [("ping", "", "cut")]),
    "cut off in the fence": (cut_after(block(PING), "```js"), "", "", [("ping", "", "cut")]),
    "cut off in the arguments": (cut_after(block(WEATHER), "Pa"), "", "", [("get_weather", '{"city": "Pa', "cut")]),
    "cut off after the arguments": (cut_after(block(WEATHER), '"}'), "", "", [CALLED]),
    "cut off in the second call": (
        cut_after(block(PING, WEATHER), "Pa"),
        "",
        "",
        [PINGED, ("get_weather", '{"city": "Pa', "cut")],
    ),
    "cut off in the end": (block(PING)[:-4], "", "", [PINGED]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_deepseek_r1_answers_are_parsed(check, case):
    check(FORM, *case)


@pytest.mark.parametrize("case", BEGUN.values(), ids=BEGUN)
def test_reasoning_begun_by_the_prompt_is_parsed(check, case):
    check(FORM, *case, starts_in_reasoning=True)
