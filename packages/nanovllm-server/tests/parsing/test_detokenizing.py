import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from nanovllm_models.token_bytes import VocabularyError
from nanovllm_server.parsing.detokenizing import Detokenizer, TextVocabulary

TEXT = st.text(alphabet=st.sampled_from("abé😀 \n"), max_size=30)


def detokenize(vocabulary, tokens):
    detokenizer = Detokenizer(vocabulary)
    return [*map(detokenizer.push, tokens), detokenizer.finish()]


@given(tokens=st.lists(st.integers(0, 262), max_size=40))
def test_text_equals_the_text_of_the_tokenizer(vocabulary, tokenizer_backend, tokens):
    pieces = detokenize(vocabulary, tokens)
    assert "".join(pieces) == tokenizer_backend.decode(tokens, skip_special_tokens=True)


@given(text=TEXT)
def test_no_piece_has_half_a_character(vocabulary, text):
    pieces = detokenize(vocabulary, text.encode())
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_character_is_returned_with_its_last_byte(vocabulary):
    detokenizer = Detokenizer(vocabulary)
    assert [detokenizer.push(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_an_unfinished_character_is_replaced_at_the_end(vocabulary):
    pieces = detokenize(vocabulary, [*b"a", 0xF0, 0x9F])
    assert pieces == ["a", "", "", "\ufffd"]


def test_token_bytes_has_all_bytes_of_a_token(vocabulary, tokenizer_backend):
    assert [vocabulary.token_bytes(token) for token in (256, 257, 258)] == [b"he", b" t", b"<|start|>"]
    assert Detokenizer(vocabulary).push(258) == ""
    assert vocabulary.token_bytes(9999) == b""


def test_special_tokens_are_text_where_they_are_tags(vocabulary):
    assert vocabulary.find_special_ids(["<|start|>", "he", "unheard of"]) == {258}
    detokenizer = Detokenizer(vocabulary, vocabulary.find_special_ids(["<|start|>"]))
    assert [detokenizer.push(token) for token in (258, 259)] == ["<|start|>", ""]


def test_sentencepiece_tokens_with_byte_fallback_are_decoded():
    vocab = {"\u2581Hi": 0, "\u2581you": 1, "<0xC3>": 2, "<0xA9>": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = detokenize(TextVocabulary(tokenizer), [0, 1, 2, 3])
    assert pieces == ["Hi", " you", "", "é", ""]
    assert "".join(pieces) == tokenizer.decode([0, 1, 2, 3])


def test_unsupported_tokenizers_are_refused():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(VocabularyError, match="WordPiece"):
        TextVocabulary(tokenizer)
