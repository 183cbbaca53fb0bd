from collections.abc import Callable

import pytest
import toy_model

from nanovllm_core import ModelSpec


@pytest.fixture
def toy_spec() -> Callable[..., ModelSpec]:
    return toy_model.toy_spec


@pytest.fixture(scope="session")
def oracle() -> Callable[[list[int], int], list[int]]:
    return toy_model.make_oracle()
