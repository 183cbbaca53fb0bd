"""Token ids of texts, segment by segment: the text between two added tokens is encoded on its own, and cached."""

import json
import logging
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from os.path import commonprefix
from threading import Lock
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.models import BPE, WordLevel

# Bytes that the texts and ids of one tokenizer's cache may take.
CACHE_BYTES = 64 << 20
# A segment that takes a larger share of the cache is not kept, as it would displace many others.
LARGEST_SHARE = 8
# Bytes of an entry besides its text and its ids: a place in an OrderedDict and the header of a bytes object.
_ENTRY_BYTES = 200
# Shorter texts are encoded sooner than an exchange is looked through.
MIN_RECEIVE_CHARACTERS = 1024

# Components that see one segment at a time and look at nothing but its text.
_INDEPENDENT_NORMALIZERS = frozenset({"Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"})
_INDEPENDENT_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"}
)
_SAMPLES = ("Hello  world's", " 2024,\n\n", "\tif x:\n    ", "e\u0301 ﬁ ½ 東京 👩‍👩‍👧", "▁a\u00a0", " ", "\n")

logger = logging.getLogger(__name__)


class SegmentCache:
    """Encoded segments by their text; the least recently used leave when all take more than `max_bytes`.

    Threads may share a cache.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that the entries take."""
        return self._num_bytes

    def find(self, segments: Iterable[str]) -> dict[str, bytes]:
        """The token ids of those of `segments` that are cached, as int32."""
        found: dict[str, bytes] = {}
        with self._lock:
            for segment in segments:
                ids = self._entries.get(segment)
                if ids is not None:
                    self._entries.move_to_end(segment)
                    found[segment] = ids
        return found

    def add(self, encoded: Mapping[str, bytes]) -> None:
        """Keep segments and their token ids."""
        with self._lock:
            for segment, ids in encoded.items():
                size = _entry_bytes(segment, ids)
                # Two threads may have encoded the same segment at the same time.
                if segment not in self._entries and size * LARGEST_SHARE <= self._max_bytes:
                    self._entries[segment] = ids
                    self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _entry_bytes(*self._entries.popitem(last=False))


class EncodingExchange(Protocol):
    """Takes encoded segments to other caches of the same tokenizer, and brings what those have encoded.

    Token ids are int32, as in `SegmentCache`. Segments may be lost on the way: they are encoded again.
    """

    def publish(self, encoded: Mapping[str, bytes]) -> None:
        """Give segments and their token ids to the others. Several threads may call it."""
        ...

    def receive(self) -> Mapping[str, bytes]:
        """What others have published since the last call. One thread at a time calls it."""
        ...


class SegmentEncoder:
    """Encodes texts as `backend` does without special tokens around them, each segment once while it is cached.

    token_ids: the added tokens at which `backend` cuts a text before anything else, and their ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, token_ids: Mapping[str, int], max_bytes: int):
        self._backend = backend
        self._ids_of_tokens = {token: array("i", [token_id]).tobytes() for token, token_id in token_ids.items()}
        self._split = re.compile(f"({longest_of([*token_ids])})").split
        self._cache = SegmentCache(max_bytes)
        self._exchange: EncodingExchange | None = None
        self._receiving = Lock()

    def share(self, exchange: EncodingExchange) -> None:
        """Exchange segments with other caches from now on, beginning with what those have to give."""
        self._exchange = exchange
        self._receive(exchange)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of `text`, read-only."""
        # Segments and added tokens in turn, segments first and last; a segment may be empty.
        parts = self._split(text)
        segments = dict.fromkeys(parts[::2])
        segments.pop("", None)
        ids = self._cache.find(segments)
        missing = [segment for segment in segments if segment not in ids]
        exchange = self._exchange
        if exchange is not None and sum(map(len, missing)) >= MIN_RECEIVE_CHARACTERS:
            self._receive(exchange)
            ids.update(self._cache.find(missing))
            missing = [segment for segment in missing if segment not in ids]
        if missing:
            # For a batch the tokenizer gives up the interpreter's lock.
            encodings = self._backend.encode_batch_fast(missing, add_special_tokens=False)
            new = {
                segment: array("i", encoding.ids).tobytes()
                for segment, encoding in zip(missing, encodings, strict=True)
            }
            self._cache.add(new)
            ids.update(new)
            if exchange is not None:
                exchange.publish(new)
        of_tokens = self._ids_of_tokens
        return np.frombuffer(b"".join([of_tokens.get(part) or ids[part] for part in parts if part]), np.int32)

    def _receive(self, exchange: EncodingExchange) -> None:
        # Until all is in the cache: another thread that misses the same segments finds them there.
        with self._receiving:
            self._cache.add(exchange.receive())


def segment_encoder(backend: tokenizers.Tokenizer, max_bytes: int = CACHE_BYTES) -> SegmentEncoder | None:
    """The encoder of `backend`'s texts by segment; None when its segments may depend on each other."""
    added = backend.get_added_tokens_decoder()
    # Tokens that are matched against normalized text are found within a segment.
    cutting = {token.content: token_id for token_id, token in added.items() if not token.normalized}
    looks_around = any(
        token.single_word or token.lstrip or token.rstrip for token in added.values() if not token.normalized
    )
    if not cutting or looks_around or backend.encode_special_tokens or not _is_independent(backend):
        return None
    try:
        encoder = SegmentEncoder(backend, cutting, max_bytes)
    # Added tokens that are prefixes of one another nest the pattern.
    except RecursionError:
        return None
    for text in _self_check_texts([*cutting]):
        if encoder.encode(text).tolist() != backend.encode(text, add_special_tokens=False).ids:
            logger.warning("the tokenizer's segments depend on each other: prompts are encoded as a whole")
            return None
    return encoder


def longest_of(words: Sequence[str]) -> str:
    """A regular expression of the longest of `words` at a place; it has a branch per character, not per word."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word)
    branches: list[str] = []
    for group in by_first.values():
        prefix = commonprefix(group)  # noqa: RUF071 (these are not paths)
        branches.append(re.escape(prefix) + longest_of([word[len(prefix) :] for word in group]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")


def _is_independent(backend: tokenizers.Tokenizer) -> bool:
    """Whether every component is known to look at one segment at a time, and gives the same ids every time."""
    model = backend.model
    if not isinstance(model, BPE | WordLevel) or (isinstance(model, BPE) and model.dropout):
        return False
    try:
        normalizers, pre_tokenizers = _components(backend.normalizer), _components(backend.pre_tokenizer)
    # A component that is written in Python has no JSON.
    except Exception:  # noqa: BLE001
        return False
    return all(part["type"] in _INDEPENDENT_NORMALIZERS for part in normalizers) and all(
        part["type"] in _INDEPENDENT_PRE_TOKENIZERS and part.get("prepend_scheme") != "first" for part in pre_tokenizers
    )


def _components(component: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as JSON, with sequences flattened; empty for None."""
    return [] if component is None else _flattened(json.loads(component.__getstate__()))


def _flattened(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    parts = next(value for key, value in state.items() if key != "type")
    return [each for part in parts for each in _flattened(part)]


def _self_check_texts(tokens: Sequence[str]) -> list[str]:
    """Texts with every token, and with every sample before, between and after tokens."""
    rest = cycle(_SAMPLES)
    texts = ["", *_SAMPLES, "".join(tokens), "".join([token + next(rest) for token in tokens])]
    return texts + [f"{sample}{tokens[0]}{sample}{tokens[-1]}{sample}" for sample in _SAMPLES]


def _entry_bytes(segment: str, ids: bytes) -> int:
    return sys.getsizeof(segment) + len(ids) + _ENTRY_BYTES
