"""Token ids in, text out: incrementally, never half a character, never past a stop string.

Works on bytes: each token stands for a fixed run of them, so that text is decided as soon as its bytes are, and the
text of a whole answer is the same however its tokens come in. This room must not know requests or HTTP.
"""

import codecs

import orjson
from tokenizers import Tokenizer


class VocabularyError(ValueError):
    """A tokenizer whose tokens don't stand for bytes."""


class Vocabulary:
    """The bytes that each token of a tokenizer stands for.

    Knows byte-level BPE (GPT-2's way of writing bytes as printable characters) and SentencePiece with byte fallback
    (Llama 2). Raises VocabularyError for other tokenizers.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        # Ids that stand for no text: end of sequence, turn markers and the like.
        self._special = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
        decoders = _decoder_names(backend)
        self._byte_level = "ByteLevel" in decoders
        if not self._byte_level and "ByteFallback" not in decoders:
            raise VocabularyError(f"the tokenizer's decoder must be ByteLevel or ByteFallback, not {decoders}")
        # SentencePiece begins every text with a space that is not part of it.
        self.strips_leading_space = "Strip" in decoders
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes of `token`; of a special one, those of its name; none of one that the tokenizer doesn't know."""
        piece = self._pieces.get(token)
        if piece is None:
            text = self._backend.id_to_token(token)
            piece = self._pieces[token] = b"" if text is None else self._bytes(text)
        return piece

    def shown(self, token: int) -> bytes:
        """The bytes that `token` adds to an answer: none if it is special."""
        return b"" if token in self._special else self.piece(token)

    def is_special(self, token: int) -> bool:
        """Whether `token` stands for no text."""
        return token in self._special

    def _bytes(self, text: str) -> bytes:
        if not self._byte_level:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            return text.replace("\u2581", " ").encode()
        try:
            return bytes(BYTES_OF_CHARACTERS[character] for character in text)
        except KeyError:
            # An added token: written as it is.
            return text.encode()


class StopMatcher:
    """Finds the stop string that ends first, however the text is cut (Knuth, Morris, Pratt 1977, one table a string).

    Of two that end together the longer wins, as no part of it may come out.
    """

    def __init__(self, stops: tuple[str, ...]):
        # Longest first, so that the first match found at a character is the longest.
        self._stops = sorted(stops, key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that can't belong to a stop string and has not come out yet."""
        self._held += text
        for end, character in enumerate(text, len(self._held) - len(text) + 1):
            for index, stop in enumerate(self._stops):
                if self._advance(index, character) == len(stop):
                    self.found = stop
                    return self._held[: end - len(stop)]
        keep = max(self._matched)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        out, self._held = self._held, ""
        return out

    def _advance(self, index: int, character: str) -> int:
        stop, table, matched = self._stops[index], self._tables[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = table[matched - 1]
        matched += stop[matched] == character
        self._matched[index] = matched
        return matched


class Detokenizer:
    """The text of one choice. `stopped` is the stop string that ended it, once one has."""

    def __init__(self, vocabulary: Vocabulary, stops: tuple[str, ...] = (), min_tokens: int = 0):
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = vocabulary.strips_leading_space
        self._matcher = StopMatcher(stops) if stops else None
        # Like an end-of-sequence token, a stop string counts only after that many tokens.
        self._unstoppable = min_tokens
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """The text that is decided with `token`, often empty. Nothing may be pushed after a stop."""
        return self._decide(self._utf8.decode(self._vocabulary.shown(token)))

    def finish(self) -> str:
        """The rest, at the end of the choice."""
        if self.stopped is not None:
            return ""
        text = self._decide(self._utf8.decode(b"", final=True))
        if self._matcher is not None and self.stopped is None:
            text += self._matcher.flush()
        return text

    def _decide(self, text: str) -> str:
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        if self._matcher is None:
            return text
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return text
        if text:
            text = self._matcher.push(text)
            self.stopped = self._matcher.found
        return text


def _failure_table(pattern: str) -> list[int]:
    table = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = table[matched - 1]
        matched += pattern[matched] == pattern[index]
        table[index] = matched
    return table


def _decoder_names(backend: Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    # Its JSON, without that of the whole vocabulary.
    decoder = orjson.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts]


def _bytes_of_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTES_OF_CHARACTERS = _bytes_of_characters()
