"""Clients' sessions are waited for when everything else has been tested."""

from pathlib import Path

import pytest

CLIENTS = Path(__file__).with_name("test_clients.py")


# After pytest has sorted tests by what they share.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path == CLIENTS and item.name.startswith("test_session["))
