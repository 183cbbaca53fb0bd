"""Token ids in, text out: incrementally, never half a character.

Works on bytes: each token stands for a fixed run of them, so that text is decided as soon as its bytes are, and the
text of a whole answer is the same however its tokens come in. This room must not know requests or HTTP.
"""

import codecs
from collections.abc import Iterable

import orjson
from tokenizers import Tokenizer


class VocabularyError(ValueError):
    """A tokenizer whose tokens don't stand for bytes."""


class Vocabulary:
    """The bytes that each token of a tokenizer stands for. specials: those that stand for no text.

    Knows byte-level BPE (GPT-2's way of writing bytes as printable characters) and SentencePiece with byte fallback
    (Llama 2). Raises VocabularyError for other tokenizers.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        # Ids that stand for no text: end of sequence, turn markers and the like.
        self.specials = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
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
        return b"" if token in self.specials else self.piece(token)

    def is_special(self, token: int) -> bool:
        """Whether `token` stands for no text."""
        return token in self.specials

    def special(self, names: Iterable[str]) -> frozenset[int]:
        """The special tokens that have one of these names."""
        return self.specials & {self._backend.token_to_id(name) for name in names}

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


class Detokenizer:
    """The text of one choice. tags: special tokens that are part of it all the same."""

    def __init__(self, vocabulary: Vocabulary, tags: frozenset[int] = frozenset()):
        self._vocabulary = vocabulary
        self._tags = tags
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = vocabulary.strips_leading_space

    def push(self, token: int) -> str:
        """The text that is decided with `token`, often empty."""
        piece = self._vocabulary.piece(token) if token in self._tags else self._vocabulary.shown(token)
        return self._decide(self._utf8.decode(piece))

    def finish(self) -> str:
        """The rest, at the end of the choice."""
        return self._decide(self._utf8.decode(b"", final=True))

    def _decide(self, text: str) -> str:
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        return text


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
