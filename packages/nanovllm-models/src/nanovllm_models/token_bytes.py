"""Translates a tokenizer's tokens to bytes."""

import tokenizers

from nanovllm_models.tokenizer_components import component_types


class VocabularyError(ValueError):
    """The tokens of a tokenizer can't be translated to bytes."""


class TokenBytes:
    """Translates tokens to bytes, for byte-level BPE (GPT-2) and SentencePiece with byte fallback (Llama 2).

    Raises VocabularyError for other tokenizers.
    strips_leading_space: whether the tokenizer's decoder removes a space at the beginning of a text.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        decoders = component_types(backend.decoder)
        self._is_byte_level = "ByteLevel" in decoders
        if not self._is_byte_level and "ByteFallback" not in decoders:
            raise VocabularyError(f"the tokenizer's decoder must be ByteLevel or ByteFallback, not {decoders}")
        self.strips_leading_space = "Strip" in decoders

    def get(self, token_id: int) -> bytes:
        """Return the bytes of a token. The bytes of a special token are its name. An unknown id has no bytes."""
        text = self._backend.id_to_token(token_id)
        return b"" if text is None else self._decode_bytes(text)

    def _decode_bytes(self, text: str) -> bytes:
        if not self._is_byte_level:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            return text.replace("\u2581", " ").encode()
        try:
            return bytes(BYTE_BY_CHARACTER[character] for character in text)
        except KeyError:
            # An added token is stored as plain text.
            return text.encode()


def _map_characters_to_bytes() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(other_bytes)})
    return table


# Byte-level BPE writes each byte as one printable character.
BYTE_BY_CHARACTER = _map_characters_to_bytes()
