"""Token ids in, text out: incrementally, never half a character.

Works on bytes: each token stands for a fixed run of them, so that text is decided as soon as its bytes are, and the
text of a whole answer is the same however its tokens come in. This room must not know requests or HTTP.
"""

import codecs
from collections.abc import Iterable

from tokenizers import Tokenizer

from nanovllm_models.token_bytes import TokenBytes


class TextVocabulary:
    """The vocabulary of a tokenizer as text: the bytes of each token. specials: tokens that stand for no text.

    Raises VocabularyError as `TokenBytes` does.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        # Ids that stand for no text: end of sequence, turn markers and the like.
        self.specials = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
        self._bytes = TokenBytes(backend)
        self.strips_leading_space = self._bytes.strips_leading_space
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes of `token`; of a special one, those of its name; none of one that the tokenizer doesn't know."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes.of(token)
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

    def id_of(self, name: str) -> int | None:
        """The token that stands for just that text, special or not."""
        return self._backend.token_to_id(name)


class Detokenizer:
    """The text of one choice. tags: special tokens that are part of it all the same."""

    def __init__(self, vocabulary: TextVocabulary, tags: frozenset[int] = frozenset()):
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
