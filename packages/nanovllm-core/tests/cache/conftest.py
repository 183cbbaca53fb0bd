"""Fixtures: a directory, and stores of block files in this directory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from block_payloads import AMPLE_BYTES, PAYLOAD_BYTES, scan

from nanovllm_core.cache.block_files import BlockFiles


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def open_files(directory) -> Iterator[Callable[..., BlockFiles]]:
    opened = []

    def open_one(max_bytes: int = AMPLE_BYTES, identity: bytes = b"model") -> BlockFiles:
        opened.append(files := BlockFiles(directory, max_bytes, identity, PAYLOAD_BYTES))
        assert files.indexed.wait(60)
        return files

    yield open_one
    for files in opened:
        files.close()


@pytest.fixture
def without_background_scans(monkeypatch) -> None:
    """Scan only once in the background: repeated scans would evict files at different times in each run."""
    monkeypatch.setattr(BlockFiles, "_scan_repeatedly", scan)
