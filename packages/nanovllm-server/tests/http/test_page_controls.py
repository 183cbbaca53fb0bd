import json

import pytest
from page_actions import read_texts, send_message, set_field, wait_for_answers

# The first test that runs may have to fetch the browser.
pytestmark = pytest.mark.timeout(180)

IS_INPUT_FOCUSED = "document.activeElement === $('input')"


def rendered_contents(tokenizer):
    return [message["content"] for message in tokenizer.rendered[-1]]


async def read_focus(tab):
    return await tab.evaluate(
        "((focused) => focused.id || focused.getAttribute('aria-label') || focused.textContent)(document.activeElement)"
    )


async def click_last(tab, selector):
    await tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).click()")


async def record_button_texts(tab, selector):
    """The page's list `buttonTexts` then gets each new text of this button, and of no other button."""
    await tab.evaluate(
        "((button, texts) => { window.buttonTexts = texts;"
        " new MutationObserver(() => texts.push(button.textContent)).observe(button, {childList: true});"
        f"}})(document.querySelector({json.dumps(selector)}), [])"
    )


async def test_copy_buttons_fill_the_clipboard(tab, engine):
    await tab.allow_clipboard()
    engine.reply = [*b"Use *this*:\n\n```py\nx = 1\n```\n"]
    await send_message(tab, "how?")
    await wait_for_answers(tab)
    for selector, text in (
        (".assistant .copy", "Use *this*:\n\n```py\nx = 1\n```"),
        (".copy-code", "x = 1"),
        (".user .copy", "how?"),
    ):
        await tab.evaluate("announce('')")
        await record_button_texts(tab, selector)
        await tab.click(selector)
        # The button shows "Copied" only for a moment.
        await tab.wait_until("buttonTexts[0] === 'Copied'")
        assert await tab.evaluate("$('status').textContent") == "Copied"
        assert (await tab.evaluate("navigator.clipboard.readText()")).rstrip("\n") == text
    await tab.wait_until("String(buttonTexts) === 'Copied,Copy'")


async def test_copy_works_without_the_clipboard_api(tab):
    """Browsers have no clipboard API on pages that come from another machine without HTTPS."""
    await tab.allow_clipboard()
    await send_message(tab, "hi")
    await wait_for_answers(tab)
    await tab.evaluate("window.readClipboard = navigator.clipboard.readText.bind(navigator.clipboard)")
    await tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    await tab.click(".assistant .copy")
    await tab.wait_until("$('status').textContent === 'Copied'")
    assert await tab.evaluate("readClipboard()") == "Hello"
    assert await tab.evaluate("document.activeElement.classList.contains('copy')")


async def test_regenerate_replaces_the_answer_and_drops_later_turns(tab, engine, tokenizer):
    await send_message(tab, "one")
    await wait_for_answers(tab)
    await send_message(tab, "two")
    await wait_for_answers(tab, 2)
    engine.reply = [*b"Again"]
    await tab.evaluate("document.querySelector('.regenerate').focus()")
    await tab.press("Enter")
    await tab.wait_until("document.querySelector('.assistant .note') && !abortController")
    assert rendered_contents(tokenizer) == ["one"]
    assert await read_texts(tab, ".text") == ["one", "Again"]
    assert await tab.evaluate(IS_INPUT_FOCUSED)
    await send_message(tab, "three")
    await wait_for_answers(tab, 2)
    assert rendered_contents(tokenizer) == ["one", "Again", "three"]


async def test_edit_sends_the_changed_message_and_drops_later_turns(tab, tokenizer):
    for number, text in enumerate(("one", "two", "three"), 1):
        await send_message(tab, text)
        await wait_for_answers(tab, number)
    edit = "document.querySelectorAll('.edit')[1]"
    await tab.evaluate(f"{edit}.click()")
    assert await read_focus(tab) == "Edited message"
    assert await tab.evaluate("document.activeElement.value") == "two"
    await tab.type(" lines")
    await tab.press("Escape")
    assert await read_texts(tab, ".edit-form") == []
    assert await tab.evaluate(IS_INPUT_FOCUSED)
    await tab.evaluate(f"{edit}.click()")
    assert await tab.evaluate("document.activeElement.value") == "two"
    await tab.evaluate("document.activeElement.select()")
    await tab.type("2")
    await tab.press("Enter", shift=True)
    await tab.type("lines")
    await tab.press("Enter")
    await tab.wait_until("document.querySelectorAll('.turn').length === 4 && !abortController")
    assert rendered_contents(tokenizer) == ["one", "Hello", "2\nlines"]
    assert await read_texts(tab, ".text") == ["one", "Hello", "2\nlines", "Hello"]
    assert await tab.evaluate(IS_INPUT_FOCUSED)


async def test_failed_message_stays_in_the_conversation_when_the_input_has_a_draft(tab, engine, tokenizer):
    await set_field(tab, "#further", '{"temperature": 9}')
    await tab.wait_until("$('model').value")
    await tab.evaluate("sendMessage('first'), $('input').value = 'draft'")
    await tab.wait_until("document.querySelector('.error') && !abortController")
    assert await tab.evaluate("$('input').value") == "draft"
    await set_field(tab, "#further", "")
    await tab.click(".regenerate")
    await wait_for_answers(tab)
    assert rendered_contents(tokenizer) == ["first"]
    assert await read_texts(tab, ".error") == []
    tab.problems.clear()


async def test_stop_button_returns_the_focus_to_the_input(tab, engine):
    engine.endless, engine.delay = True, 0.01
    await send_message(tab, "hi")
    await tab.wait_until("document.querySelector('.assistant .markdown')?.textContent")
    await tab.type("next")
    await tab.press("Enter")
    assert await tab.evaluate("Boolean(abortController) && $('input').value") == "next"
    assert (
        await tab.evaluate("document.querySelector('.user .edit').checkVisibility({visibilityProperty: true})") is False
    )
    await tab.press("Tab")
    assert await read_focus(tab) == "send"
    await tab.press("Enter")
    await wait_for_answers(tab)
    assert await tab.evaluate(IS_INPUT_FOCUSED)
    assert await tab.evaluate("$('status').textContent") == "The answer is stopped."


async def test_tab_order_follows_the_conversation(tab, engine):
    engine.reply = [*b"See [this](https://example.com):\n\n```py\nx = 1\n```"]
    await send_message(tab, "hi")
    await wait_for_answers(tab)
    await tab.evaluate("$('toggle').focus()")
    focused_names = []
    while not focused_names or focused_names[-1] != "send":
        await tab.press("Tab")
        focused_names.append(await read_focus(tab))
        assert len(focused_names) < 20, focused_names
    # `scroll` is a box that scrolls. Browsers may also focus this box.
    assert [name for name in focused_names if name != "scroll"] == [
        *("Copy", "Edit", "this", "Copy code, py", "Code, py", "Copy", "Regenerate", "input", "send")
    ]


async def test_screen_reader_finds_the_conversation(tab, engine):
    engine.reply = [*b"## Part\n\n- item\n\n| a |\n|---|\n| b |\n\n```py\nx = 1\n```"]
    log = "[$('log').getAttribute('role'), $('log').ariaLive, $('log').ariaBusy]"
    assert await tab.evaluate(log) == ["log", "polite", None]
    await send_message(tab, "hi")
    await wait_for_answers(tab)
    assert await tab.evaluate("$('status').textContent") == "The answer is complete."
    nodes = await tab.read_accessible_nodes()
    for node in (
        ("log", "Conversation"),
        ("article", "Your message"),
        ("article", "Answer of scripted"),
        ("heading", "Part"),
        ("listitem", ""),
        ("columnheader", "a"),
        ("button", "Copy code, py"),
        ("button", "Regenerate"),
        ("group", "Actions"),
        ("status", ""),
        ("textbox", "Message"),
        ("button", "Send"),
    ):
        assert node in nodes, (node, nodes)
    unnamed = [
        role for role, name in nodes if role in ("button", "textbox", "link", "combobox", "spinbutton") and not name
    ]
    assert unnamed == []
    engine.endless, engine.delay = True, 0.01
    await send_message(tab, "hi")
    await tab.wait_until("[...document.querySelectorAll('.assistant')].at(-1).querySelector('.markdown')?.textContent")
    assert await tab.evaluate(log) == ["log", "polite", "true"]
    assert await tab.evaluate("$('status').textContent") == "The model is answering."
    await tab.press("Escape")
    await wait_for_answers(tab, 2)
    assert await tab.evaluate(log) == ["log", "polite", None]
