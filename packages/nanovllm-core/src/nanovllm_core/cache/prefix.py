"""Hashes of full blocks. Each hash covers the block and all tokens before it."""

import hashlib
import secrets
from collections.abc import Callable
from struct import pack

from nanovllm_core.config import PrefixHash
from nanovllm_core.request_state import BlockHash, RequestState

_TOKEN_BYTES = 4
# (hash of the previous block, tokens as bytes, bytes per block) -> hashes of the full blocks in `tokens`.
ChainHash = Callable[[BlockHash, bytes, int], list[BlockHash]]


def _fast(parent: BlockHash, tokens: bytes, block_bytes: int) -> list[BlockHash]:
    # CPython's 64-bit hash, keyed per process. It avoids accidental collisions, but not those of an attacker.
    hashes: list[BlockHash] = []
    for end in range(block_bytes, len(tokens) + 1, block_bytes):
        parent = hash((parent, tokens[end - block_bytes : end]))
        hashes.append(parent)
    return hashes


def _sha256(parent: BlockHash, tokens: bytes, block_bytes: int) -> list[BlockHash]:
    if isinstance(parent, int):
        raise TypeError("a SHA-256 chain continues from bytes")
    hashes: list[BlockHash] = []
    for end in range(block_bytes, len(tokens) + 1, block_bytes):
        parent = hashlib.sha256(parent + tokens[end - block_bytes : end]).digest()
        hashes.append(parent)
    return hashes


class PrefixHasher:
    """Extends a request's chain of block hashes as its tokens become known."""

    def __init__(self, kind: PrefixHash, block_size: int):
        self._block_size = block_size
        self._kind: PrefixHash = kind
        self._chain: ChainHash = _sha256 if kind == "sha256" else _fast
        # A random secret per engine, so that clients cannot compute hashes.
        self._secret = secrets.token_bytes(32)

    def extend(self, request: RequestState) -> None:
        """Append the missing hashes of full blocks of known tokens to `request.block_hashes`."""
        hashes, start = request.block_hashes, len(request.block_hashes) * self._block_size
        if start + self._block_size > request.num_tokens:
            return
        parent = hashes[-1] if hashes else self._root(request.client_request.cache_salt)
        hashes += self._chain(parent, _known_bytes(request, start), self._block_size * _TOKEN_BYTES)

    def _root(self, salt: str) -> BlockHash:
        root = hashlib.sha256(self._secret + salt.encode()).digest()
        return root if self._kind == "sha256" else hash(root)


def _known_bytes(request: RequestState, start: int) -> bytes:
    """The known tokens from `start` on, as bytes of int32."""
    outputs = request.output_ids[max(start - request.num_prompt_tokens, 0) :]
    # For the 64 outputs that decodes convert at a time, struct takes half the time of numpy and array.
    packed = pack(f"{len(outputs)}i", *outputs)
    return packed if start >= request.num_prompt_tokens else request.prompt_ids[start:].tobytes() + packed
