"""Payloads of block files, and functions that look at the files of a store."""

import random
from pathlib import Path

from nanovllm_core.cache.block_files import BlockFiles

PAYLOAD_BYTES = 5000
HASHES = [random.Random(number).randbytes(32) for number in range(40)]
AMPLE_BYTES = 1 << 30


def payload_of(block_hash: bytes, num_bytes: int = PAYLOAD_BYTES) -> memoryview:
    return memoryview(random.Random(block_hash).randbytes(num_bytes))


def read(files: BlockFiles, block_hash: bytes) -> bytes | None:
    into = memoryview(bytearray(PAYLOAD_BYTES))
    return bytes(into) if files.read(block_hash, into) else None


def path_of(directory: Path, block_hash: bytes) -> Path:
    [path] = directory.glob(f"*/{block_hash.hex()}.safetensors")
    return path


def sum_sizes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def scan(files: BlockFiles) -> None:
    with files._scan_lock:
        files._scan()
