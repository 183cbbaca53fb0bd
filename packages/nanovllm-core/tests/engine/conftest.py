from collections.abc import Callable

import pytest
import toy_model

from nanovllm_core import ModelSpec
from nanovllm_core.engine import build
from nanovllm_core.scheduling.draft_times import DraftTimes


@pytest.fixture
def toy_spec() -> Callable[..., ModelSpec]:
    return toy_model.toy_spec


@pytest.fixture(scope="session")
def oracle() -> Callable[[list[int], int], list[int]]:
    return toy_model.make_oracle()


@pytest.fixture
def always_drafts(monkeypatch):
    """Make steps propose and verify as many drafts as allowed: all predicted times are 0."""
    monkeypatch.setattr(build, "measure_draft_times", lambda *_: DraftTimes())
