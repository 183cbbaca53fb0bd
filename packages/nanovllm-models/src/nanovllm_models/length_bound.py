"""Computes a lower bound for the number of tokens of a text, without encoding the text."""

from typing import NamedTuple

import tokenizers

from nanovllm_models.token_bytes import BYTE_BY_CHARACTER
from nanovllm_models.tokenizer_components import component_types

# Maximum number of characters that NFC normalization composes into one character.
MAX_COMPOSED_CHARACTERS = 4


class TokenCountBound(NamedTuple):
    """Computes the minimum number of tokens of a text from its number of characters.

    max_token_characters: maximum number of characters that become one token.
    dropped_characters: characters that the tokenizer drops.
    """

    max_token_characters: int
    dropped_characters: tuple[str, ...]

    def min_num_tokens(self, text: str) -> int:
        """Return the lower bound for `text`."""
        num_characters = len(text) - sum(map(text.count, self.dropped_characters))
        return -(-num_characters // self.max_token_characters)


def find_length_bound(backend: tokenizers.Tokenizer) -> TokenCountBound | None:
    """Return the bound; None if the tokenizer is not byte-level, or may drop or combine arbitrary characters."""
    strips_spaces = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    is_byte_level = "ByteLevel" in component_types(backend.decoder)
    normalizers = component_types(backend.normalizer)
    if strips_spaces or not is_byte_level or not set(normalizers) <= {"NFC"}:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    dropped_bytes = {byte for character, byte in BYTE_BY_CHARACTER.items() if character not in vocabulary}
    # The tokenizer drops bytes without a token. Each character outside ASCII has a UTF-8 byte from 0x80 to 0xBF. If one
    # of these bytes has no token, the tokenizer may drop characters outside ASCII.
    if any(0x80 <= byte < 0xC0 for byte in dropped_bytes):
        return None
    # A byte-level token's name has one character per byte, so the text has at most as many characters as the name.
    max_token_characters = max(map(len, vocabulary)) * (MAX_COMPOSED_CHARACTERS if normalizers else 1)
    return TokenCountBound(max_token_characters, tuple(chr(byte) for byte in dropped_bytes if byte < 0x80))
