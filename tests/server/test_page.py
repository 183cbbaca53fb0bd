import browser
import picture
import pytest

# The first run downloads the browser.
pytestmark = pytest.mark.timeout(180)


async def test_page_streams_an_answer_and_updates_statistics(server):
    async with browser.open_tab() as tab:
        await tab.open(server.url)
        await tab.wait_until("$('model').value && !$('figures').classList.contains('stale')")
        await tab.wait_until("$('running').textContent === '0' && $('rate').textContent === '0.0'")
        await tab.evaluate("$('further').value = JSON.stringify({ignore_eos: true})")
        await tab.type("What is the capital of France?")
        await tab.press("Enter")
        text_expression = "document.querySelector('.assistant .text')?.textContent"
        await tab.wait_until(f"{text_expression}?.includes('Paris')")
        lengths = []
        while len(lengths) < 4:
            lengths.append(await tab.evaluate(f"{text_expression}.length"))
            await tab.wait_until(f"{text_expression}.length > {lengths[-1]}")
        await tab.wait_until("$('running').textContent === '1' && parseFloat($('cache').textContent) > 0")
        await tab.wait_until("parseFloat($('rate').textContent) > 0")
        await tab.wait_until("/\\d+ ms|\\d s/.test($('ttft').textContent)")
        assert await tab.evaluate("$('curve').getAttribute('points').split(' ').length") >= 2
        await tab.press("Escape")
        await tab.wait_until("document.querySelector('.note')?.textContent === 'stopped'")
        await tab.wait_until("$('running').textContent === '0' && $('rate').textContent === '0.0'")
        assert tab.problems == []
        assert all(address.startswith((server.url, "data:")) for address in tab.requested_urls)


async def test_the_picture_in_the_readme_can_be_taken(server):
    png = await picture.take_picture(server.url)
    assert png.startswith(b"\x89PNG")
    assert 20_000 < len(png) < 200_000
