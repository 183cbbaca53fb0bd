"""Takes the picture of the chat page for the README.

uv run nanovllm-server --port 8000
uv run python packages/nanovllm-server/tests/support/picture.py http://127.0.0.1:8000 docs/page.png
"""

import asyncio
import sys
from pathlib import Path

import browser

QUESTIONS = ("What is the capital of France?", "Tell me about its most famous sights.")
FIELD_VALUES = {"[name=temperature]": "0", "[name=max_tokens]": "300", "#system": "You are a helpful assistant."}
MIN_ANSWER_CHARACTERS = 500


async def take_picture(url: str) -> bytes:
    async with browser.open_tab() as tab:
        await tab.set_screen(1280, 820, scale=1.5)
        await tab.open(url)
        await tab.wait_until("$('model').value")
        for selector, text in FIELD_VALUES.items():
            await tab.evaluate(f"document.querySelector({selector!r}).value = {text!r}")
        for number, question in enumerate(QUESTIONS, 1):
            await tab.type(question)
            await tab.press("Enter")
            length_expression = (
                f"[...document.querySelectorAll('.assistant .text')].at({number - 1})?.textContent.length"
            )
            done_expression = f"document.querySelectorAll('.note').length === {number}"
            await tab.wait_until(
                done_expression
                if number < len(QUESTIONS)
                else f"{done_expression} || {length_expression} > {MIN_ANSWER_CHARACTERS}",
                120,
            )
        return await tab.screenshot()


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(asyncio.run(take_picture(sys.argv[1])))
