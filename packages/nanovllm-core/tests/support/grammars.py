"""Grammars over the toy vocabulary, and checks of their outputs."""

import json
import re
from collections.abc import Callable, Sequence

import pytest
import toy_model

from nanovllm_core import GrammarSpec
from nanovllm_core.grammar import grammars
from nanovllm_core.grammar.compiler import Compiler
from nanovllm_core.grammar.vetting import Vetter

OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"enum": ["x", "true"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
TAGGED = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "json_schema", "json_schema": OBJECT},
        ],
    },
}
JSON = GrammarSpec("json_schema", json.dumps(OBJECT))
REGEX = GrammarSpec("regex", "(ab|x[0-9]{2}){3,5}")
EBNF = GrammarSpec("ebnf", 'root ::= item ("," item)*\nitem ::= [a-c] | "(" root ")"')
TAG = GrammarSpec("structural_tag", json.dumps(TAGGED))
_ELEMENTS = {
    "begin": "<p n=",
    "key_end": ">",
    "end": "</p>",
    "tags": ["</p>", "<p n="],
    "wraps_values_in_line_breaks": False,
    "json_schema": OBJECT,
}
XML = GrammarSpec(
    "structural_tag",
    json.dumps({"type": "structural_tag", "format": {"type": "xml_parameters", **_ELEMENTS}}),
)
XML_TYPES = {
    "properties": {"a": {"type": ["integer"]}, "b": {"type": ["string"]}, "c": {"type": ["array"]}},
    "additionalProperties": {"type": []},
}
# The grammar SLOW is valid. Compiling SLOW takes about ten seconds.
_NUM_RULES = 5000
_RULES = [
    f'r{i} ::= ([a-c] | "(" r{(i * 7 + 1) % _NUM_RULES} ")" | "b{i}" r{(i + 3) % _NUM_RULES}){{3,40}}'
    for i in range(_NUM_RULES)
]
SLOW = GrammarSpec("ebnf", "\n".join(["root ::= " + " | ".join(f"r{i}" for i in range(_NUM_RULES)), *_RULES]))


def text_of(tokens: Sequence[int]) -> bytes:
    pieces = toy_model.toy_vocabulary().tokens
    return b"".join(pieces[token] for token in tokens)


def matches_object_schema(text: bytes) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and {"a", "b"} <= value.keys() <= {"a", "b", "c"}
        and type(value["a"]) is int
        and value["b"] in ("x", "true")
        and all(isinstance(item, bool) for item in value.get("c", []))
        and len(value.get("c", [])) <= 3
        and re.search(rb"\s{2}", text) is None
    )


def matches_ebnf(text: bytes) -> bool:
    # Replace innermost lists by an item until no list is left.
    while (shorter := re.sub(rb"\([a-c](,[a-c])*\)", b"a", text)) != text:
        text = shorter
    return re.fullmatch(rb"[a-c](,[a-c])*", text) is not None


def is_tagged(text: bytes) -> bool:
    _, tag, rest = text.partition(b"</think>")
    return tag != b"" and matches_object_schema(rest)


CHECKS: dict[GrammarSpec, Callable[[bytes], bool]] = {
    JSON: matches_object_schema,
    REGEX: lambda text: re.fullmatch(rb"(ab|x[0-9]{2}){3,5}", text) is not None,
    EBNF: matches_ebnf,
    TAG: is_tagged,
}


def toy_compiler() -> Compiler:
    vocabulary = toy_model.toy_vocabulary()
    return Compiler(vocabulary.tokens, vocabulary.end_ids, toy_model.VOCAB)


class SharedVetter(Vetter):
    """Engines share this vetter, because starting a vetter takes seconds. `start` and `close` do nothing."""

    def __init__(self) -> None:
        super().__init__(toy_model.toy_vocabulary, toy_model.VOCAB)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammars, "Vetter", lambda *_: self)
