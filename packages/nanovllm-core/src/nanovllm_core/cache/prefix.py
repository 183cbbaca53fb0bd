"""Hashes full blocks. The hash of a block covers the block and all tokens before it."""

import hashlib
import secrets
from collections.abc import Callable
from struct import pack

from nanovllm_core.config import HashAlgorithm
from nanovllm_core.request_state import BlockHash, RequestState

_TOKEN_BYTES = 4
# (hash of the previous block, tokens as bytes, bytes per block) -> hashes of the full blocks.
HashBlocks = Callable[[BlockHash, bytes, int], list[BlockHash]]


def _hash_blocks_fast(previous_hash: BlockHash, tokens: bytes, block_bytes: int) -> list[BlockHash]:
    # CPython's hash has a secret key per process. But unlike SHA-256, its 64 bits do not prevent deliberate collisions.
    ends = range(block_bytes, len(tokens) + 1, block_bytes)
    return [previous_hash := hash((previous_hash, tokens[end - block_bytes : end])) for end in ends]


def _hash_blocks_sha256(previous_hash: BlockHash, tokens: bytes, block_bytes: int) -> list[BlockHash]:
    if isinstance(previous_hash, int):
        raise TypeError("previous_hash must be bytes, because the algorithm is SHA-256")
    ends = range(block_bytes, len(tokens) + 1, block_bytes)
    return [previous_hash := hashlib.sha256(previous_hash + tokens[end - block_bytes : end]).digest() for end in ends]


class PrefixHasher:
    """Computes the block hashes of requests.

    secret: engines with equal secrets have equal SHA-256 hashes; None for a new random secret.
    """

    def __init__(self, algorithm: HashAlgorithm, block_size: int, secret: bytes | None = None):
        self._block_size = block_size
        self._algorithm: HashAlgorithm = algorithm
        self._hash_blocks: HashBlocks = _hash_blocks_sha256 if algorithm == "sha256" else _hash_blocks_fast
        # Clients do not know this secret, so they can't compute hashes to search for collisions.
        self._secret = secret or secrets.token_bytes(32)

    def extend_hashes(self, request: RequestState) -> None:
        """Append the missing hashes of full blocks to `request.block_hashes`."""
        hashes, start = request.block_hashes, len(request.block_hashes) * self._block_size
        if start + self._block_size > request.num_tokens:
            return
        previous_hash = hashes[-1] if hashes else self._root_hash(request.client_request.cache_salt)
        hashes += self._hash_blocks(previous_hash, _token_bytes(request, start), self._block_size * _TOKEN_BYTES)

    def _root_hash(self, salt: str) -> BlockHash:
        """The hash before the first block."""
        digest = hashlib.sha256(self._secret + salt.encode()).digest()
        return digest if self._algorithm == "sha256" else hash(digest)


def _token_bytes(request: RequestState, start: int) -> bytes:
    """The tokens from position `start` on, as int32 bytes."""
    outputs = request.output_ids[max(start - request.num_prompt_tokens, 0) :]
    # For 64 tokens, struct takes half the time of numpy.
    output_bytes = pack(f"{len(outputs)}i", *outputs)
    return output_bytes if start >= request.num_prompt_tokens else request.prompt_ids[start:].tobytes() + output_bytes
