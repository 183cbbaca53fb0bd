"""The bytes that a tokenizer's tokens stand for.

This room must not know which tokens end an answer or are left out of it.
"""

import json

import tokenizers


class VocabularyError(ValueError):
    """A tokenizer whose tokens don't stand for bytes."""


class TokenBytes:
    """The bytes of each token of `backend`.

    Knows byte-level BPE (GPT-2's way of writing bytes as printable characters) and SentencePiece with byte fallback
    (Llama 2). Raises VocabularyError for other tokenizers.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        decoders = _decoder_names(backend)
        self._byte_level = "ByteLevel" in decoders
        if not self._byte_level and "ByteFallback" not in decoders:
            raise VocabularyError(f"the tokenizer's decoder must be ByteLevel or ByteFallback, not {decoders}")
        # SentencePiece begins every text with a space that is not part of it.
        self.strips_leading_space = "Strip" in decoders

    def of(self, token: int) -> bytes:
        """The bytes of `token`; of a special one, those of its name; none of one that the tokenizer doesn't know."""
        text = self._backend.id_to_token(token)
        return b"" if text is None else self._bytes(text)

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


def _decoder_names(backend: tokenizers.Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    # Its JSON, without that of the whole vocabulary.
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts]


def _bytes_of_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTES_OF_CHARACTERS = _bytes_of_characters()
