from collections.abc import Callable, Sequence
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm_models.chat_formats import THINK, TOOL_CALL_FORMATS, ChatFormat
from nanovllm_server.parsing import parser as parser_module
from nanovllm_server.parsing.events import CallBegun
from nanovllm_server.parsing.parser import MAX_PIECE_LENGTH, Parser
from nanovllm_server.parsing.source import ReadGenerator, Source

FORMS = {name: ChatFormat(THINK, form) for name, form in TOOL_CALL_FORMATS.items()}
JSON_BITS = [*'{}[]:,"\\', "{}", '"name": "ping"', '"name": "pi', '"arguments": {', '"parameters": {', "1.5", "null"]
OTHER_BITS = [*" \n<>`;/", "ping", "search", "query", "exact", "True", "é", "😀", "say ", "``", "<tool", "</", "<|"]


def words(form: ChatFormat) -> list[str]:
    """The tags of a format, and texts that may be between tags."""
    tags = [getattr(part, field.name) for part in (form.reasoning, form.tool_calls) for field in fields(part)]
    return [*(tag for tag in tags if isinstance(tag, str) and tag), *JSON_BITS, *OTHER_BITS]


@st.composite
def answers(draw):
    form = FORMS[draw(st.sampled_from(sorted(FORMS)))]
    word = st.sampled_from(words(form))
    cut_word = st.builds(lambda text, end: text[:end], word, st.integers(1, 12))
    return form, "".join(draw(st.lists(st.one_of(word, word, cut_word), max_size=30)))


@given(answer=answers(), flags=st.tuples(*[st.booleans()] * 3), data=st.data())
def test_events_do_not_depend_on_the_pieces(parse_answer, answer, flags, data):
    form, text = answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    names = ("starts_in_reasoning", "calls_only_at_start", "is_content_constrained")
    options = dict(zip(names, flags, strict=True))
    expected = parse_answer(form, [text], **options)
    assert parse_answer(form, pieces, **options) == expected
    assert parse_answer(form, text, **options) == expected


@given(answer=answers())
def test_text_that_is_no_call_is_unchanged(parse_answer, answer):
    form, text = answer
    parsed_answer = parse_answer(ChatFormat(None, form.tool_calls), text)
    if not parsed_answer.calls:
        assert parsed_answer.content == text


@given(answer=answers())
def test_calls_only_at_start_are_read_only_there(parse_answer, answer):
    form, text = answer
    calls_form = ChatFormat(None, form.tool_calls)
    parser = Parser(calls_form, tools={"ping": None, "search": None})
    events = parser.push(text) + parser.finish()
    begins_with_call = bool(events) and isinstance(events[0], CallBegun)
    expected = parse_answer(calls_form, text) if begins_with_call else parse_answer(calls_form, text, tools=None)
    assert parse_answer(calls_form, text, calls_only_at_start=True) == expected


@given(answer=answers())
def test_reasoning_loses_whitespace_and_tags_only(parse_answer, answer):
    _, text = answer
    parsed_answer = parse_answer(ChatFormat(THINK, None), text, starts_in_reasoning=True)
    reasoning, end, content = text.lstrip(" \n").removeprefix("<think>").partition("</think>")
    assert parsed_answer.reasoning == (reasoning.strip(" \n") if end else reasoning.lstrip(" \n"))
    assert parsed_answer.content == content.lstrip(" \n")


@given(text=st.text(max_size=60))
def test_text_without_a_format_is_unchanged(parse_answer, text):
    form = ChatFormat(None, None)
    assert parse_answer(form, text).content == text


class CountingSource(Source):
    """Counts the characters that each call examines at most: all unread text if the call searches or copies it."""

    num_examined = 0

    def feed(self, piece: str) -> None:
        super().feed(piece)
        self._count_unread()

    def read_until(self, tags: Sequence[str], sink: Callable[[str], None]) -> ReadGenerator[str | None]:
        self._count_unread()
        return (yield from super().read_until(tags, sink))

    def read_name(self, end: str) -> ReadGenerator[str | None]:
        self._count_unread()
        return (yield from super().read_name(end))

    def stop_recording(self) -> str:
        recording = super().stop_recording()
        CountingSource.num_examined += len(recording)
        return recording

    def _count_unread(self) -> None:
        CountingSource.num_examined += len(self._text) - self._position


def count_examined(parse_answer, form: ChatFormat, pieces: list[str], *, starts_in_reasoning: bool) -> int:
    CountingSource.num_examined = 0
    parse_answer(form, pieces, starts_in_reasoning=starts_in_reasoning)
    return CountingSource.num_examined


@pytest.mark.parametrize("starts_in_reasoning", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_parsing_examines_linearly_many_characters(parse_answer, name, starts_in_reasoning, monkeypatch):
    monkeypatch.setattr(parser_module, "Source", CountingSource)
    size = 8 * MAX_PIECE_LENGTH
    begin = FORMS[name].tool_calls.begin
    for part in (
        " ",
        "<",
        "{",
        begin,
        f"{begin}{{",
        '{"name": "ping", "arguments": {}',
        f'{begin}{{"a": "',
        "</think>",
    ):
        text = part * (2 * size // len(part))
        for cut in (
            lambda text: [text[start : start + 7] for start in range(0, len(text), 7)],
            lambda text: [f'{begin}{{"name": "ping", "arguments": {{"a": "{text}'],
        ):
            num_short, num_long = (
                count_examined(parse_answer, FORMS[name], cut(text[:length]), starts_in_reasoning=starts_in_reasoning)
                for length in (size, 2 * size)
            )
            assert num_short > size
            assert num_long < 2.2 * num_short, part
