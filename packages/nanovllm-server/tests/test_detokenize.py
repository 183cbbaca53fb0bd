"""Text comes out incrementally, whole characters only, and never past a stop string."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from nanovllm_server.detokenize import Detokenizer, StopMatcher, Vocabulary, VocabularyError

TEXT = st.text(alphabet=st.sampled_from("abé😀 \n"), max_size=30)
STOPS = st.lists(st.text(alphabet=st.sampled_from("ab😀"), min_size=1, max_size=4), min_size=1, max_size=3)


def run(vocabulary, tokens, stops=(), min_tokens=0):
    detokenizer = Detokenizer(vocabulary, tuple(stops), min_tokens)
    pieces = []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped is not None:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.stopped


def first_stop(text, stops):
    """Where the stop string that ends first begins, found the slow way."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


@given(tokens=st.lists(st.integers(0, 262), max_size=40))
def test_any_tokens_give_what_the_tokenizer_itself_decodes(vocabulary, backend, tokens):
    pieces, _ = run(vocabulary, tokens)
    assert "".join(pieces) == backend.decode(tokens, skip_special_tokens=True)


@given(text=TEXT)
def test_never_half_a_character(vocabulary, text):
    pieces, _ = run(vocabulary, text.encode())
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_a_character_comes_out_with_its_last_byte(vocabulary):
    detokenizer = Detokenizer(vocabulary)
    assert [detokenizer.push(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_an_unfinished_character_is_replaced_at_the_end(vocabulary):
    pieces, _ = run(vocabulary, [*b"a", 0xF0, 0x9F])
    assert pieces == ["a", "", "", "\ufffd"]


@given(text=TEXT, stops=STOPS)
def test_stop_strings_by_bytes(vocabulary, text, stops):
    pieces, stopped = run(vocabulary, text.encode(), stops)
    expected = first_stop(text, stops)
    if expected is None:
        assert ("".join(pieces), stopped) == (text, None)
    else:
        assert ("".join(pieces), stopped) == (text[: expected[0]], expected[1])


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_stop_strings_whatever_the_cut(text, stops, cuts):
    matcher = StopMatcher(tuple(stops))
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    out = ""
    for start, end in itertools.pairwise(bounds):
        out += matcher.push(text[start:end])
        # Whatever came out can't be taken back, so it must be before the first stop.
        assert text.startswith(out)
        if matcher.found:
            break
    expected = first_stop(text, stops)
    if expected is None:
        assert matcher.found is None
        assert out + matcher.flush() == text
    else:
        assert (out, matcher.found) == (text[: expected[0]], expected[1])


def test_held_text_comes_out_as_soon_as_it_is_decided(vocabulary):
    detokenizer = Detokenizer(vocabulary, ("abc",))
    assert [detokenizer.push(byte) for byte in b"xababdc"] == ["x", "", "", "ab", "", "abd", "c"]


def test_stop_strings_do_not_count_before_min_tokens(vocabulary):
    pieces, stopped = run(vocabulary, b"a!b!c", ["!"], min_tokens=3)
    assert ("".join(pieces), stopped) == ("a!b", "!")


def test_tokens_of_several_characters(vocabulary, backend):
    assert [vocabulary.piece(token) for token in (256, 257, 258)] == [b"he", b" t", b"<|start|>"]
    assert vocabulary.shown(258) == b""
    assert vocabulary.piece(9999) == b""


def test_sentencepiece_with_byte_fallback():
    vocab = {"\u2581Hi": 0, "\u2581you": 1, "<0xC3>": 2, "<0xA9>": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces, _ = run(Vocabulary(tokenizer), [0, 1, 2, 3])
    assert pieces == ["Hi", " you", "", "é", ""]
    assert "".join(pieces) == tokenizer.decode([0, 1, 2, 3])


def test_other_tokenizers_are_refused():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(VocabularyError, match="WordPiece"):
        Vocabulary(tokenizer)
