"""The page in a real browser, in front of a real server with a real model."""

import browser
import picture
import pytest

# The first run downloads the browser.
pytestmark = pytest.mark.timeout(180)


async def test_a_streamed_answer_and_moving_figures(server):
    async with browser.page() as tab:
        await tab.open(server.url)
        await tab.until("$('model').value && !$('figures').classList.contains('stale')")
        await tab.until("$('running').textContent === '0' && $('rate').textContent === '0.0'")
        await tab.value("$('further').value = JSON.stringify({ignore_eos: true})")
        await tab.type("What is the capital of France?")
        await tab.press("Enter")
        shown = "document.querySelector('.assistant .text')?.textContent"
        await tab.until(f"{shown}?.includes('Paris')")
        lengths = []
        # The answer goes on until the context is full, which leaves time for several checks.
        while len(lengths) < 4:
            lengths.append(await tab.value(f"{shown}.length"))
            await tab.until(f"{shown}.length > {lengths[-1]}")
        await tab.until("$('running').textContent === '1' && parseFloat($('cache').textContent) > 0")
        await tab.until("parseFloat($('rate').textContent) > 0")
        await tab.until("/\\d+ ms|\\d s/.test($('ttft').textContent)")
        assert await tab.value("$('curve').getAttribute('points').split(' ').length") >= 2
        await tab.press("Escape")
        await tab.until("document.querySelector('.note')?.textContent === 'stopped'")
        await tab.until("$('running').textContent === '0' && $('rate').textContent === '0.0'")
        assert tab.problems == []
        assert all(address.startswith((server.url, "data:")) for address in tab.requested)


async def test_the_picture_in_the_readme_can_be_taken(server):
    png = await picture.take(server.url)
    assert png.startswith(b"\x89PNG")
    assert 20_000 < len(png) < 200_000
