"""Converts token ids to text incrementally, and returns whole characters only.

Each token stands for fixed bytes, so that the text does not depend on how the tokens are grouped.
"""

import codecs
from collections.abc import Iterable

from tokenizers import Tokenizer

from nanovllm_models.token_bytes import TokenBytes


class TextVocabulary:
    """The bytes of each token of a tokenizer. specials: ids of special tokens, such as end of sequence.

    Raises VocabularyError as `TokenBytes` does.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self.specials = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
        self._bytes = TokenBytes(backend)
        self.strips_leading_space = self._bytes.strips_leading_space
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes of `token`: for a special token, its name; for an unknown id, empty."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes.of(token)
        return piece

    def shown(self, token: int) -> bytes:
        """The bytes that `token` adds to an answer: empty for a special token."""
        return b"" if token in self.specials else self.piece(token)

    def is_special(self, token: int) -> bool:
        """Whether `token` is special."""
        return token in self.specials

    def special(self, names: Iterable[str]) -> frozenset[int]:
        """The ids of the special tokens with these names."""
        return self.specials & {self._backend.token_to_id(name) for name in names}

    def id_of(self, name: str) -> int | None:
        """The id of the token `name`, special or not; None if the tokenizer has no such token."""
        return self._backend.token_to_id(name)


class Detokenizer:
    """Detokenizes one choice. tags: special tokens that are part of the text."""

    def __init__(self, vocabulary: TextVocabulary, tags: frozenset[int] = frozenset()):
        self._vocabulary = vocabulary
        self._tags = tags
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = vocabulary.strips_leading_space

    def push(self, token: int) -> str:
        """Adds a token; returns the characters that are complete now, often none."""
        piece = self._vocabulary.piece(token) if token in self._tags else self._vocabulary.shown(token)
        return self._without_leading_space(self._utf8.decode(piece))

    def finish(self) -> str:
        """Returns the remaining text at the end of the choice."""
        return self._without_leading_space(self._utf8.decode(b"", final=True))

    def _without_leading_space(self, text: str) -> str:
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        return text
