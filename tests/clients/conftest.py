"""Moves the tests that wait for the clients' sessions to the end of the run."""

from pathlib import Path

import pytest

CLIENT_TESTS = Path(__file__).with_name("test_clients.py")


# Run last, because pytest sorts tests by their shared fixtures in the same hook.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path == CLIENT_TESTS and item.name.startswith("test_session["))
