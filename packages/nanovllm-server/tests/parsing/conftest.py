from dataclasses import dataclass, field

import pytest

from nanovllm_server.parsing.events import CallArguments, CallBegun, CallEnded, ContentText, ReasoningText
from nanovllm_server.parsing.parser import Parser

TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": ["integer", "null"]},
            "exact": {"type": "boolean"},
            "ratio": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filter": {"type": "object"},
            "note": {"type": ["string", "null"]},
            "kind": {"enum": ["web", "news"]},
            "level": {"enum": [1, 2.5, None, [], {}]},
            "fixed": {"const": True},
            "order": {"$ref": "#/$defs/order"},
            "since": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
            "loop": {"$ref": "#/properties/loop"},
        },
        "$defs": {"order": {"enum": ["up", "down"]}},
    },
    "ping": None,
}


@dataclass
class ParsedAnswer:
    """calls: (name, arguments) of each call. An incomplete call has "cut" as a third item."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, ...]] = field(default_factory=list)


def parse_pieces(form, pieces, *, tools=TOOLS, **options) -> ParsedAnswer:
    parser = Parser(form, tools=tools, **options)
    answer = ParsedAnswer()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    calls: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningText(text):
                assert not calls or len(calls[-1]) == 2
                answer.reasoning += text
            case ContentText(text):
                answer.content += text
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append([name, "", "cut"])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                assert calls[index].pop() == "cut"
                calls[index][1] += text
                calls[index].append("cut")
            case CallEnded(index):
                assert index == len(calls) - 1
                assert calls[index].pop() == "cut"
        assert getattr(event, "text", "some")
    answer.calls = [tuple(call) for call in calls]
    assert parser.num_calls == len(calls)
    assert parser.in_call == bool(calls and calls[-1][-1] == "cut" and len(calls[-1]) == 3)
    return answer


def check_pieces(form, text, expected, **options) -> None:
    assert parse_pieces(form, [text], **options) == expected
    assert parse_pieces(form, text, **options) == expected
    for cut in range(len(text) + 1):
        assert parse_pieces(form, [text[:cut], text[cut:]], **options) == expected, cut


@pytest.fixture(scope="session")
def parse_answer():
    return parse_pieces


@pytest.fixture(scope="session")
def check():
    def check(form, text, reasoning="", content="", calls=(), **options):
        check_pieces(form, text, ParsedAnswer(reasoning, content, list(calls)), **options)

    return check
