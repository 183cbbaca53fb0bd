from collections.abc import Callable

import pytest
import toy_model

from nanovllm_core import ModelSpec
from nanovllm_core.scheduling.drafting import DraftPlanner


@pytest.fixture
def toy_spec() -> Callable[..., ModelSpec]:
    return toy_model.toy_spec


@pytest.fixture(scope="session")
def oracle() -> Callable[[list[int], int], list[int]]:
    return toy_model.make_oracle()


@pytest.fixture
def always_drafts(monkeypatch):
    """Steps propose and verify as many drafts as they may, although few are accepted, or a draft takes a long time."""
    monkeypatch.setattr(DraftPlanner, "_choose_profitable", lambda self, max_drafts, *_: max_drafts)
    monkeypatch.setattr(DraftPlanner, "_pays", lambda self, num_drafts, *_: bool(num_drafts.any()))
