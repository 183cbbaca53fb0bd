import browser
import pytest


@pytest.fixture
async def tab(url):
    async with browser.open_tab() as tab:
        await tab.set_screen(1300, 850)
        await tab.open(url)
        yield tab
        assert tab.problems == []
        assert {address for address in tab.requested_urls if not address.startswith((f"{url}/", "data:"))} == set()
