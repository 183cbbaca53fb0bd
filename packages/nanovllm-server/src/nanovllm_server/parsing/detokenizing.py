"""Converts token ids to text incrementally, and returns only complete characters."""

import codecs
from collections.abc import Iterable

from tokenizers import Tokenizer

from nanovllm_models.token_bytes import TokenBytes


class TextVocabulary:
    """The bytes of each token of a tokenizer. Raises VocabularyError if the kind of tokenizer is not supported.

    strips_leading_space: decoding removes one space at the beginning of a text.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self.special_ids = frozenset(
            token_id for token_id, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self._token_bytes = TokenBytes(backend)
        self.strips_leading_space = self._token_bytes.strips_leading_space
        self._bytes_by_id: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token. A special token has the bytes of its name; an unknown id has b""."""
        token_bytes = self._bytes_by_id.get(token_id)
        if token_bytes is None:
            token_bytes = self._bytes_by_id[token_id] = self._token_bytes.get(token_id)
        return token_bytes

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special."""
        return token_id in self.special_ids

    def find_special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Returns the ids of the special tokens with these names."""
        return self.special_ids & {self._backend.token_to_id(name) for name in names}

    def find_id(self, name: str) -> int | None:
        """Returns the id of the token `name`, special or not; None if the tokenizer lacks this token."""
        return self._backend.token_to_id(name)


class Detokenizer:
    """Converts the tokens of one choice to text. tag_ids: the special tokens whose names are part of the text."""

    def __init__(self, vocabulary: TextVocabulary, tag_ids: frozenset[int] = frozenset()):
        self._vocabulary = vocabulary
        self._tag_ids = tag_ids
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._must_strip_space = vocabulary.strips_leading_space

    def push(self, token_id: int) -> str:
        """Adds a token. Returns the characters that the token completes, possibly none."""
        has_text = token_id in self._tag_ids or not self._vocabulary.is_special(token_id)
        token_bytes = self._vocabulary.token_bytes(token_id) if has_text else b""
        return self._without_leading_space(self._utf8_decoder.decode(token_bytes))

    def finish(self) -> str:
        """Returns the remaining text at the end of the choice."""
        return self._without_leading_space(self._utf8_decoder.decode(b"", final=True))

    def _without_leading_space(self, text: str) -> str:
        if self._must_strip_space and text:
            text = text.removeprefix(" ")
            self._must_strip_space = False
        return text
