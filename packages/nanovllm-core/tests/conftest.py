from collections.abc import Iterator

import pytest
from grammars import SharedVetter


@pytest.fixture(scope="session")
def vetter() -> Iterator[SharedVetter]:
    """One process that tries grammars for all tests that need no limits of their own."""
    vetter = SharedVetter()
    yield vetter
    vetter.end()
