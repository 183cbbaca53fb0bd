"""Fixtures for tests of engines that fetch blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import toy_model
from transfer_pairs import allow_long_silence, write_secret

from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.transfer.fetch_times import FetchTimes


@pytest.fixture
def always_fetch(monkeypatch):
    """A toy model computes faster than it fetches, so override the predictions."""
    monkeypatch.setattr(CopyTimeModel, "predict", lambda *_: 0.0)
    monkeypatch.setattr(FetchTimes, "is_worthwhile", lambda *_: True)


@pytest.fixture
def long_silence(monkeypatch):
    """Fetches wait long for a peer."""
    allow_long_silence(monkeypatch)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return write_secret(tmp_path / "secret")


@pytest.fixture(scope="module")
def oracle() -> Callable[[list[int], int], list[int]]:
    return toy_model.make_oracle()
