"""The chat page in a browser."""

import browser
import pytest


@pytest.fixture
async def tab(url):
    """A tab that shows the page of the scripted server. Fails if a request or a script of the page failed."""
    async with browser.open_tab() as tab:
        await tab.set_screen(1300, 850)
        await tab.open(url)
        yield tab
        # `problems` has errors of scripts and violations of the page's policy.
        assert tab.problems == []
        assert {address for address in tab.requested_urls if not address.startswith((f"{url}/", "data:"))} == set()
