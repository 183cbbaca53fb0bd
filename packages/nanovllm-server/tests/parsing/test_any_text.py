"""Parsers of random text raise nothing, lose no text, take linear time, and give the same events for any pieces."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm_models.chat_formats import THINK, TOOL_CALL_FORMATS, ChatFormat

FORMS = {name: ChatFormat(THINK, form) for name, form in TOOL_CALL_FORMATS.items()}
JSON_BITS = [*'{}[]:,"\\', "{}", '"name": "ping"', '"name": "pi', '"arguments": {', '"parameters": {', "1.5", "null"]
OTHER_BITS = [*" \n<>`;/", "ping", "search", "query", "exact", "True", "é", "😀", "say ", "``", "<tool", "</", "<|"]


def words(form: ChatFormat) -> list[str]:
    """The tags of a format, and texts that may be between them."""
    tags = [getattr(part, field.name) for part in (form.reasoning, form.tool_calls) for field in fields(part)]
    return [*(tag for tag in tags if isinstance(tag, str) and tag), *JSON_BITS, *OTHER_BITS]


@st.composite
def answers(draw):
    """A format, and random text of its tags, some of which are incomplete."""
    form = FORMS[draw(st.sampled_from(sorted(FORMS)))]
    word = st.sampled_from(words(form))
    cut_word = st.builds(lambda text, end: text[:end], word, st.integers(1, 12))
    return form, "".join(draw(st.lists(st.one_of(word, word, cut_word), max_size=30)))


@given(answer=answers(), begun=st.booleans(), calls_only_at_start=st.booleans(), data=st.data())
def test_events_do_not_depend_on_the_pieces(listen, answer, begun, calls_only_at_start, data):
    form, text = answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = listen(form, [text], begun=begun, calls_only_at_start=calls_only_at_start)
    assert listen(form, pieces, begun=begun, calls_only_at_start=calls_only_at_start) == whole
    assert listen(form, text, begun=begun, calls_only_at_start=calls_only_at_start) == whole


@given(answer=answers())
def test_text_that_is_no_call_is_unchanged(listen, answer):
    form, text = answer
    said = listen(ChatFormat(None, form.tool_calls), text)
    if not said.calls:
        assert said.content == text


@given(answer=answers())
def test_calls_only_at_start_are_read_only_there(listen, answer):
    form, text = answer
    alone = ChatFormat(None, form.tool_calls)
    begins = [form.tool_calls.begin, getattr(form.tool_calls, "call_begin", "{")]
    if getattr(form.tool_calls, "bare", True) and text.lstrip(" \n").startswith(tuple(begins)):
        assert listen(alone, text, calls_only_at_start=True) == listen(alone, text)
    elif not text.lstrip(" \n").startswith(form.tool_calls.begin):
        assert listen(alone, text, calls_only_at_start=True) == listen(alone, text, tools=None)


@given(answer=answers())
def test_reasoning_loses_whitespace_and_tags_only(listen, answer):
    _, text = answer
    said = listen(ChatFormat(THINK, None), text, begun=True)
    reasoning, end, content = text.lstrip(" \n").removeprefix("<think>").partition("</think>")
    assert said.reasoning == (reasoning.strip(" \n") if end else reasoning.lstrip(" \n"))
    assert said.content == content.lstrip(" \n")


@given(text=st.text(max_size=60))
def test_text_without_a_format_is_unchanged(listen, text):
    form = ChatFormat(None, None)
    assert listen(form, text).content == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_parsing_takes_linear_time(listen, name, begun):
    # If parsing took quadratic time, a text of this size would take minutes.
    size = 100_000
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
        text = (part * size)[:size]
        listen(FORMS[name], [text[at : at + 7] for at in range(0, size, 7)], begun=begun)
        listen(FORMS[name], [f'{begin}{{"name": "ping", "arguments": {{"a": "{text}'], begun=begun)
