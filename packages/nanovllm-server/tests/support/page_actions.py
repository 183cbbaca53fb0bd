import json
from typing import Any

from browser import BrowserTab


async def send_message(tab: BrowserTab, text: str) -> None:
    await tab.wait_until("$('model').value")
    await tab.evaluate("$('input').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def wait_for_answers(tab: BrowserTab, number: int = 1) -> None:
    await tab.wait_until(f"document.querySelectorAll('.assistant .note').length === {number}")


async def set_field(tab: BrowserTab, selector: str, text: str) -> None:
    await tab.evaluate(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}")


async def read_texts(tab: BrowserTab, selector: str) -> Any:
    return await tab.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((found) => found.textContent)"
    )
