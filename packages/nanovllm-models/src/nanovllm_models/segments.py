"""Encodes a text's segments (the parts between added tokens, such as special tokens) and caches their token ids."""

import logging
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from os.path import commonprefix
from threading import Lock
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.models import BPE, WordLevel

from nanovllm_models.tokenizer_components import component_states

# Maximum size of a tokenizer's cache.
MAX_CACHE_BYTES = 64 << 20
# A segment that exceeds 1 / MIN_SEGMENTS of the cache is not cached, because it would displace many segments.
MIN_SEGMENTS = 8
# Memory of a cached segment besides text and ids: for the OrderedDict and the header of a bytes object.
_ENTRY_OVERHEAD_BYTES = 200
# Encoding fewer characters than this is faster than receiving segments of other processes.
MIN_RECEIVE_CHARACTERS = 1024

# Normalizers and pre-tokenizers that treat each segment independently.
_INDEPENDENT_NORMALIZERS = frozenset({"Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"})
_INDEPENDENT_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"}
)
# Texts with which `make_segment_encoder` checks that segments are independent.
_SAMPLE_TEXTS = ("Hello  world's", " 2024,\n\n", "\tif x:\n    ", "e\u0301 ﬁ ½ 東京 👩‍👩‍👧", "▁a\u00a0", " ", "\n")

logger = logging.getLogger(__name__)


class SegmentCache:
    """A thread-safe cache of segments' token ids, as bytes of int32. Drops the least recently used segments if full."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of all cached segments and their token ids, in bytes."""
        return self._num_bytes

    def find(self, segments: Iterable[str]) -> dict[str, bytes]:
        """Return the token ids of the cached segments among `segments`, by segment."""
        cached_ids: dict[str, bytes] = {}
        with self._lock:
            for segment in segments:
                ids = self._entries.get(segment)
                if ids is not None:
                    self._entries.move_to_end(segment)
                    cached_ids[segment] = ids
        return cached_ids

    def add(self, encoded: Mapping[str, bytes]) -> None:
        """Add segments and their token ids."""
        with self._lock:
            for segment, ids in encoded.items():
                entry_bytes = _entry_bytes(segment, ids)
                # The segment may be cached already, because two threads may encode a segment at the same time.
                if segment not in self._entries and entry_bytes * MIN_SEGMENTS <= self._max_bytes:
                    self._entries[segment] = ids
                    self._num_bytes += entry_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _entry_bytes(*self._entries.popitem(last=False))


class EncodingExchange(Protocol):
    """Exchanges segments and their token ids (bytes of int32) with processes that use the same tokenizer.

    Segments may get lost.
    """

    def publish(self, encoded: Mapping[str, bytes]) -> None:
        """Send segments and their token ids to the other processes. Several threads may call this method at once."""
        ...

    def receive(self) -> Mapping[str, bytes]:
        """Return the segments that other processes published since the last call. Call from one thread at a time."""
        ...


class SegmentEncoder:
    """Encodes texts like `backend.encode` with add_special_tokens=False, and caches the ids of each segment.

    splitting_ids: ids of the added tokens at which `backend` splits texts, by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, splitting_ids: Mapping[str, int], max_bytes: int):
        self._backend = backend
        self._ids_by_token = {token: array("i", [token_id]).tobytes() for token, token_id in splitting_ids.items()}
        self._split = re.compile(f"({longest_match_pattern([*splitting_ids])})").split
        self._cache = SegmentCache(max_bytes)
        self._exchange: EncodingExchange | None = None
        self._receive_lock = Lock()

    def share(self, exchange: EncodingExchange) -> None:
        """Exchange segments through `exchange` from now on. Cache the segments that were published before."""
        self._exchange = exchange
        self._receive(exchange)

    def encode(self, text: str, max_cached_tokens: int | None = None) -> NDArray[np.int32]:
        """Return the token ids of `text`: int32 [n], read-only.

        max_cached_tokens: if `text` has more tokens, new segments are neither cached nor published; None for no limit.
        """
        # Parts with even indices are segments, which may be empty. The other parts are added tokens.
        parts = self._split(text)
        segments = dict.fromkeys(parts[::2])
        segments.pop("", None)
        known_ids = self._cache.find(segments)
        missing = [segment for segment in segments if segment not in known_ids]
        exchange = self._exchange
        if exchange is not None and sum(map(len, missing)) >= MIN_RECEIVE_CHARACTERS:
            self._receive(exchange)
            known_ids.update(self._cache.find(missing))
            missing = [segment for segment in missing if segment not in known_ids]
        encoded: dict[str, bytes] = {}
        if missing:
            # Unlike `encode`, `encode_batch_fast` releases the interpreter's lock.
            encodings = self._backend.encode_batch_fast(missing, add_special_tokens=False)
            missing_ids = (array("i", encoding.ids).tobytes() for encoding in encodings)
            encoded = dict(zip(missing, missing_ids, strict=True))
            known_ids.update(encoded)
        ids_by_token = self._ids_by_token
        text_ids = b"".join([ids_by_token.get(part) or known_ids[part] for part in parts if part])
        token_ids = np.frombuffer(text_ids, np.int32)
        if encoded and (max_cached_tokens is None or len(token_ids) <= max_cached_tokens):
            self._cache.add(encoded)
            if exchange is not None:
                exchange.publish(encoded)
        return token_ids

    def _receive(self, exchange: EncodingExchange) -> None:
        # The lock is held until the cache has the segments, because waiting threads search the cache next.
        with self._receive_lock:
            self._cache.add(exchange.receive())


def make_segment_encoder(backend: tokenizers.Tokenizer, max_bytes: int = MAX_CACHE_BYTES) -> SegmentEncoder | None:
    """Return an encoder for `backend`; None if a segment's ids may depend on other segments."""
    added_tokens = backend.get_added_tokens_decoder()
    # Texts are not split at normalized added tokens: the backend finds these later, in a segment's normalized text.
    splitting_ids = {token.content: token_id for token_id, token in added_tokens.items() if not token.normalized}
    depends_on_context = any(
        token.single_word or token.lstrip or token.rstrip for token in added_tokens.values() if not token.normalized
    )
    if (
        not splitting_ids
        or depends_on_context
        or backend.encode_special_tokens
        or not _has_independent_segments(backend)
    ):
        return None
    try:
        encoder = SegmentEncoder(backend, splitting_ids, max_bytes)
    # The pattern can be nested too deeply: each added token that is a prefix of another added token adds a level.
    except RecursionError:
        return None
    for text in _make_check_texts([*splitting_ids]):
        if encoder.encode(text).tolist() != backend.encode(text, add_special_tokens=False).ids:
            logger.warning("the tokenizer's segments depend on each other: prompts are encoded as a whole")
            return None
    return encoder


def longest_match_pattern(words: Sequence[str]) -> str:
    """Return a regular expression that matches the longest of the `words` that stand at a position.

    The expression tests a common prefix only once, which is faster than testing each word.
    """
    words_by_first_character: dict[str, list[str]] = {}
    for word in words:
        if word:
            words_by_first_character.setdefault(word[0], []).append(word)
    branches: list[str] = []
    for group in words_by_first_character.values():
        prefix = commonprefix(group)  # noqa: RUF071 (these are not paths)
        branches.append(re.escape(prefix) + longest_match_pattern([word[len(prefix) :] for word in group]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")


def _has_independent_segments(backend: tokenizers.Tokenizer) -> bool:
    """Return whether `backend` encodes each segment independently of the others, as far as its components tell."""
    model = backend.model
    if not isinstance(model, BPE | WordLevel) or (isinstance(model, BPE) and model.dropout):
        return False
    try:
        normalizers, pre_tokenizers = component_states(backend.normalizer), component_states(backend.pre_tokenizer)
    # A component that is written in Python can't be serialized.
    except Exception:  # noqa: BLE001
        return False
    return all(part["type"] in _INDEPENDENT_NORMALIZERS for part in normalizers) and all(
        part["type"] in _INDEPENDENT_PRE_TOKENIZERS and part.get("prepend_scheme") != "first" for part in pre_tokenizers
    )


def _make_check_texts(tokens: Sequence[str]) -> list[str]:
    samples = cycle(_SAMPLE_TEXTS)
    texts = ["", *_SAMPLE_TEXTS, "".join(tokens), "".join([token + next(samples) for token in tokens])]
    return texts + [f"{sample}{tokens[0]}{sample}{tokens[-1]}{sample}" for sample in _SAMPLE_TEXTS]


def _entry_bytes(segment: str, ids: bytes) -> int:
    return sys.getsizeof(segment) + len(ids) + _ENTRY_OVERHEAD_BYTES
