"""Names for cached blocks: a hash chain, in which each full block's hash covers every token before it as well.

This room must not know which blocks exist.
"""

import hashlib
import secrets
from array import array
from collections.abc import Callable, Sequence

from nanovllm_core.config import PrefixHash
from nanovllm_core.request import BlockHash, Request

ChainHash = Callable[[BlockHash, Sequence[int]], BlockHash]


def _fast(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    # CPython's tuple hash: 64 bits, no copy into bytes. Good against accidents, not against an adversary.
    return hash((parent, *tokens))


def _sha256(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    if isinstance(parent, int):
        raise TypeError("a SHA-256 chain continues from bytes")
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixHasher:
    """Extends a request's chain of block hashes as its tokens become known."""

    def __init__(self, kind: PrefixHash, block_size: int):
        self._block_size = block_size
        self._kind: PrefixHash = kind
        self._chain: ChainHash = _sha256 if kind == "sha256" else _fast
        # Drawn anew by each engine, so that nobody outside knows where chains begin.
        self._secret = secrets.token_bytes(32)

    def extend(self, request: Request) -> None:
        """Give `request.block_hashes` an entry for every full block of its known tokens."""
        size, hashes, tokens = self._block_size, request.block_hashes, request.token_ids
        if (len(hashes) + 1) * size > len(tokens):
            return
        parent = hashes[-1] if hashes else self._root(request.cache_salt)
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent = self._chain(parent, tokens[start : start + size])
            hashes.append(parent)

    def _root(self, salt: str) -> BlockHash:
        root = hashlib.sha256(self._secret + salt.encode()).digest()
        return root if self._kind == "sha256" else hash(root)
