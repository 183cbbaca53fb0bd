import pytest

from nanovllm_models.chat_formats import MINIMAX_M2, THINK, ChatFormat

FORM = ChatFormat(THINK, MINIMAX_M2)
WEATHER = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
CALLED = ("get_weather", '{"city": "Paris"}')
PING = '<invoke name="ping"></invoke>'
PINGED = ("ping", "{}")
TWO_PARAMETERS = (
    '<invoke name="get_weather"><parameter name="city">Rome</parameter><parameter name="days">2</parameter></invoke>'
)


def block(calls):
    return f"<minimax:tool_call>\n{calls}</minimax:tool_call>"


def search(key, value):
    return block(f'<invoke name="search">\n<parameter name="{key}">{value}</parameter>\n</invoke>\n')


# Cases by name: (text, reasoning, content, calls).
BEGUN = {
    "nothing": ("", "", "", []),
    "reasoning, then content": ("Hm.\n</think>\n\nHello.", "Hm.", "Hello.", []),
    "reasoning without end": ("Hm.\nHello.", "Hm.\nHello.", "", []),
    "a call in reasoning is reasoning": (f"Hm.\n{block(PING)}", f"Hm.\n{block(PING)}", "", []),
    "no reasoning": ("</think>Hello.", "", "Hello.", []),
    "reasoning, begun again": ("<think>Hm.</think>Hello.", "Hm.", "Hello.", []),
    "one call": (f"Hm.\n</think>\n\n{block(WEATHER)}", "Hm.", "", [CALLED]),
    "text, then a call": (f"Hm.\n</think>\n\nI look.\n{block(WEATHER)}", "Hm.", "I look.", [CALLED]),
    "cut off in the call": (f"Hm.</think>{block(TWO_PARAMETERS)[:70]}", "Hm.", "", [("get_weather", "", "cut")]),
}

CASES = {
    "plain text": (" <b>a</b> ", "", " <b>a</b> ", []),
    "reasoning all the same": (f"<think>Hm.</think>\n{block(PING)}", "Hm.", "", [PINGED]),
    "one call": (block(WEATHER), "", "", [CALLED]),
    "several calls in a block": (block(WEATHER + PING + WEATHER), "", "", [CALLED, PINGED, CALLED]),
    "several blocks": (f"{block(WEATHER)}\n{block(PING)}", "", "", [CALLED, PINGED]),
    "text around blocks": (f"1\n{block(WEATHER)}\n2\n{block(PING)}\n", "", "1\n2", [CALLED, PINGED]),
    "no parameters": (block(PING), "", "", [PINGED]),
    "two parameters": (block(TWO_PARAMETERS), "", "", [("get_weather", '{"city": "Rome", "days": 2}')]),
    "a string keeps its line breaks": (search("query", "\n"), "", "", [("search", r'{"query": "\n"}')]),
    "a string that looks like a number": (search("query", "007"), "", "", [("search", '{"query": "007"}')]),
    "an integer": (search("limit", "7"), "", "", [("search", '{"limit": 7}')]),
    "an integer with space around": (search("limit", " 7 "), "", "", [("search", '{"limit": 7}')]),
    "an integer parameter with a value that is not an integer": (
        search("limit", "007"),
        "",
        "",
        [("search", '{"limit": "007"}')],
    ),
    "a boolean": (search("exact", "false"), "", "", [("search", '{"exact": false}')]),
    "an array": (search("tags", "[1, [2]]"), "", "", [("search", '{"tags": [1, [2]]}')]),
    "an object": (search("filter", "{}"), "", "", [("search", '{"filter": {}}')]),
    "an object with tags": (
        search("filter", '{"a": "</invoke>"}'),
        "",
        "",
        [("search", '{"filter": {"a": "</invoke>"}}')],
    ),
    "tags and quotes": (search("query", '<a b="c"></a>'), "", "", [("search", r'{"query": "<a b=\"c\"></a>"}')]),
    "unicode": (search("clé", "é😀"), "", "", [("search", '{"clé": "é😀"}')]),
    "null": (search("note", "null"), "", "", [("search", '{"note": null}')]),
    "no schema": (search("other", "1e3"), "", "", [("search", '{"other": "1e3"}')]),
    "no schema, an array": (search("other", "[1, 2]"), "", "", [("search", '{"other": "[1, 2]"}')]),
    "no schema, null": (search("other", "null"), "", "", [("search", '{"other": "null"}')]),
    "no schema of the function": (
        block('<invoke name="ping"><parameter name="a">7</parameter></invoke>'),
        "",
        "",
        [("ping", '{"a": "7"}')],
    ),
    "a forgotten end of a value": (
        block(
            '<invoke name="get_weather">\n<parameter name="city">Rome\n<parameter name="days">2</parameter></invoke>'
        ),
        "",
        "",
        [("get_weather", '{"city": "Rome", "days": 2}')],
    ),
    "a forgotten end of the last value": (
        block('<invoke name="get_weather">\n<parameter name="city">Rome\n</invoke>'),
        "",
        "",
        [("get_weather", '{"city": "Rome"}')],
    ),
    "a forgotten end of the last value, then another call": (
        block('<invoke name="get_weather">\n<parameter name="city">Paris\n</invoke>\n' + WEATHER + PING),
        "",
        "",
        [CALLED, CALLED, PINGED],
    ),
    "an unknown function": (block('<invoke name="no"></invoke>'), "", "", [("no", "{}")]),
    "no block": (f"Now: {WEATHER}ok", "", "Now:\nok", [CALLED]),
    "no block and no such function": ('<invoke name="no"></invoke>', "", '<invoke name="no"></invoke>', []),
    "a block without a call": (block("none "), "", block("none "), []),
    "a block that ends at once": (block(""), "", block(""), []),
    "an empty name": (block('<invoke name=""></invoke>'), "", block('<invoke name=""></invoke>'), []),
    "text among the calls": (block(PING + "and "), "", "and </minimax:tool_call>", [PINGED]),
    "text for parameters": (block('<invoke name="ping">x</invoke>'), "", block('<invoke name="ping">x</invoke>'), []),
    "end tags as content": ("a</invoke></minimax:tool_call>", "", "a</invoke></minimax:tool_call>", []),
    "no end of the call": (
        block('<invoke name="ping"><parameter name="a">1</parameter>') + ".",
        "",
        ".",
        [("ping", '{"a": "1"}')],
    ),
    "a name that is too long": (block(f'<invoke name="{"n" * 257}">'), "", block(f'<invoke name="{"n" * 257}">'), []),
    "a name of the maximum length": (block(f'<invoke name="{"n" * 256}"></invoke>'), "", "", [("n" * 256, "{}")]),
    "cut off in the tag": ("ok <minimax:tool", "", "ok <minimax:tool", []),
    "cut off in the name": (block(PING)[:30], "", block(PING)[:30], []),
    "cut off after the name": (block(PING)[:40], "", "", [("ping", "", "cut")]),
    "cut off in a value": (block(TWO_PARAMETERS)[:-60], "", "", [("get_weather", '{"city": "Rome"', "cut")]),
    "cut off in the second call": (
        block(WEATHER + TWO_PARAMETERS)[:-100],
        "",
        "",
        [CALLED, ("get_weather", "", "cut")],
    ),
    "cut off before the end": (f"<minimax:tool_call>{WEATHER}", "", "", [CALLED]),
    "cut off in the end": (f"<minimax:tool_call>{WEATHER}</mini", "", "", [CALLED]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_minimax_m2_answers_are_parsed(check, case):
    check(FORM, *case)


@pytest.mark.parametrize("case", BEGUN.values(), ids=BEGUN)
def test_reasoning_begun_by_the_prompt_is_parsed(check, case):
    check(FORM, *case, starts_in_reasoning=True)
