from collections.abc import Iterator

import pytest
from grammars import SharedVetter


@pytest.fixture(scope="session")
def vetter() -> Iterator[SharedVetter]:
    """One process that vets grammars, for all tests that set no limits of their own."""
    vetter = SharedVetter()
    yield vetter
    vetter.end()
