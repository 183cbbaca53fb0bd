from collections.abc import Callable

import pytest
import toy_model

from nanovllm_core import ModelSpec
from nanovllm_core.scheduling.step_time import StepTimeModel


@pytest.fixture
def toy_spec() -> Callable[..., ModelSpec]:
    return toy_model.toy_spec


@pytest.fixture(scope="session")
def oracle() -> Callable[[list[int], int], list[int]]:
    return toy_model.make_oracle()


@pytest.fixture
def always_drafts(monkeypatch):
    """Steps propose and verify as many drafts as they may, because no step seems to take time."""
    monkeypatch.setattr(StepTimeModel, "observe", lambda self, work, seconds: None)
