import asyncio
import dataclasses
import json

import browser
import pytest
from page_actions import read_texts, send_message, set_field, wait_for_answers

from nanovllm_core.engine.status import EngineStats
from nanovllm_models.chat_formats import REASONING_FORMATS, TOOL_CALL_FORMATS, ChatFormat
from nanovllm_server.parsing.model_format import ModelFormat

# The first test that runs may have to fetch the browser.
pytestmark = pytest.mark.timeout(180)

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> &amp; <b>bold</b>"


async def test_conversation_is_shown_and_sent(tab, engine, tokenizer):
    engine.reply = [*"Hello, wörld 😀!".encode()]
    await send_message(tab, "hi")
    await wait_for_answers(tab)
    assert await read_texts(tab, ".turn h2") == ["You", "scripted"]
    assert await read_texts(tab, ".text") == ["hi", "Hello, wörld 😀!"]
    (note,) = await read_texts(tab, ".note")
    assert note.startswith("stop · ")
    assert "tokens · first after" in note
    await set_field(tab, "#system", "Be brief.")
    await set_field(tab, "[name=temperature]", "0.5")
    await set_field(tab, "[name=seed]", "7")
    await set_field(tab, "#further", '{"top_k": 3}')
    await send_message(tab, "and then?")
    await wait_for_answers(tab, 2)
    assert [message["content"] for message in tokenizer.rendered[-1]] == [
        "Be brief.",
        "hi",
        "Hello, wörld 😀!",
        "and then?",
    ]
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 7, 3)
    await tab.click("#clear")
    assert await read_texts(tab, ".turn") == []
    await send_message(tab, "again")
    await wait_for_answers(tab)
    assert [message["content"] for message in tokenizer.rendered[-1]] == ["Be brief.", "again"]


async def test_shift_enter_is_a_new_line(tab, tokenizer):
    await tab.wait_until("$('model').value")
    await tab.type("one")
    await tab.press("Enter", shift=True)
    await tab.type("two")
    await tab.press("Enter")
    await wait_for_answers(tab)
    assert tokenizer.rendered[-1][-1]["content"] == "one\ntwo"
    assert await tab.evaluate("$('input').value") == ""


@pytest.mark.parametrize("stop_control", ["Stop", "Escape"])
async def test_answer_grows_until_it_is_stopped(tab, engine, service, tokenizer, stop_control):
    # The next request contains the answer, which is longer if the test is stopped for seconds.
    engine.info = dataclasses.replace(engine.info, max_model_len=10**6)
    engine.endless, engine.delay = True, 0.01
    await send_message(tab, "hi")
    await tab.wait_until("document.querySelector('.assistant .text')")
    lengths = []
    for _ in range(3):
        lengths.append(await tab.evaluate("document.querySelector('.assistant .text').textContent.length"))
        await tab.wait_until(f"document.querySelector('.assistant .text').textContent.length > {lengths[-1]}")
    assert await tab.evaluate("$('send').textContent") == "Stop"
    assert await tab.evaluate("$('log').getAttribute('aria-busy')") == "true"
    await (tab.click("#send") if stop_control == "Stop" else tab.press("Escape"))
    await wait_for_answers(tab)
    assert await read_texts(tab, ".note") == ["stopped"]
    assert await tab.evaluate("$('send').textContent") == "Send"
    async with asyncio.timeout(30):
        while service.admission.num_active or engine.num_active:
            await asyncio.sleep(0.01)
    engine.endless = False
    await send_message(tab, "go on")
    await wait_for_answers(tab, 2)
    answer = (await read_texts(tab, ".assistant .text"))[0]
    assert len(answer) > lengths[-1]
    assert ("Hello" * len(answer)).startswith(answer)
    assert tokenizer.rendered[-1][1]["content"] == answer


async def test_reasoning_is_folded(tab, engine, service, vocabulary, tokenizer):
    service.model_format = ModelFormat(ChatFormat(REASONING_FORMATS["think"], None), vocabulary)
    engine.reply = [*b"<think>\nLet me see.\n</think>\n\nIt is 4."]
    await send_message(tab, "2 + 2?")
    await wait_for_answers(tab)
    assert await tab.evaluate("document.querySelector('details').open") is False
    assert await tab.evaluate("document.querySelector('details .text').checkVisibility()") is False
    assert await read_texts(tab, "details .text") == ["Let me see."]
    assert await read_texts(tab, ".assistant > .text") == ["It is 4."]
    await tab.click("summary")
    await tab.wait_until("document.querySelector('details .text').checkVisibility()")
    await send_message(tab, "sure?")
    await wait_for_answers(tab, 2)
    assert tokenizer.rendered[-1][1]["reasoning"] == "Let me see."


async def test_tool_calls_are_shown_and_answered(tab, engine, service, vocabulary, tokenizer, monkeypatch):
    # Replace the scripted template, which refuses tool messages.
    monkeypatch.setattr(tokenizer, "render_chat", lambda messages, **_: tokenizer.rendered.append([*messages]) or "x")
    service.model_format = ModelFormat(ChatFormat(None, TOOL_CALL_FORMATS["hermes"]), vocabulary)
    calls = [{"name": "weather", "arguments": {"city": city}} for city in ("Paris", "Oslo")]
    calls_text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    engine.reply = [*f"Let me look.\n{calls_text}".encode()]
    await set_field(tab, "#further", json.dumps({"tools": [TOOL]}))
    await send_message(tab, "Where is it warmer?")
    await wait_for_answers(tab)
    assert await read_texts(tab, ".call b") == ["weather", "weather"]
    assert [json.loads(text) for text in await read_texts(tab, ".call pre")] == [{"city": "Paris"}, {"city": "Oslo"}]
    engine.reply = [*b"In Paris."]
    for number, result in ((1, "18 degrees"), (2, "7 degrees")):
        await tab.evaluate(f"document.querySelectorAll('.call textarea')[{number - 1}].value = {result!r}")
    await tab.evaluate("[...document.querySelectorAll('.turn button')].at(-1).click()")
    await wait_for_answers(tab, 2)
    assert (await read_texts(tab, ".assistant > .text"))[-1] == "In Paris."
    _, call, *results = tokenizer.rendered[-1]
    assert [tool_call["function"]["arguments"] for tool_call in call["tool_calls"]] == [
        {"city": "Paris"},
        {"city": "Oslo"},
    ]
    assert [result["content"] for result in results] == ["18 degrees", "7 degrees"]
    assert [result["tool_call_id"] for result in results] == [tool_call["id"] for tool_call in call["tool_calls"]]


async def test_hostile_text_is_not_parsed_as_html(tab, engine):
    engine.reply = [*HOSTILE.encode()]
    await send_message(tab, HOSTILE)
    await wait_for_answers(tab)
    # The answer is Markdown, in which `&amp;` means `&`. The user's message is plain text.
    assert await read_texts(tab, ".text") == [HOSTILE, HOSTILE.replace("&amp;", "&")]
    assert await tab.evaluate("document.querySelectorAll('.turn img, .turn script, .turn b').length") == 0
    assert await tab.evaluate("document.title") == "nanovllm"


async def test_policy_blocks_injected_html(tab):
    set_inner_html = "(() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } })()"
    assert await tab.evaluate(set_inner_html) == "TypeError"
    tab.problems.clear()


async def test_an_error_is_shown_as_the_api_gives_it(tab, engine):
    await set_field(tab, "#further", '{"temperature": 9}')
    await send_message(tab, "hi")
    await tab.wait_until("document.querySelector('.error')")
    (error_text,) = await read_texts(tab, ".error")
    assert "temperature must be a number from 0 to 2, not 9" in error_text
    assert "400 · invalid_request_error · invalid_value · param: temperature" in error_text
    assert await tab.evaluate("$('input').value") == "hi"
    await set_field(tab, "#further", "{")
    await tab.press("Enter")
    await tab.wait_until("document.querySelectorAll('.error').length === 2")
    assert "Further fields are not valid JSON" in (await read_texts(tab, ".error"))[-1]
    await set_field(tab, "#further", "")
    await tab.press("Enter")
    await wait_for_answers(tab)
    assert len(engine.requests) == 1
    # The browser's console also shows the error.
    assert tab.problems == ["Failed to load resource: the server responded with a status of 400 ()"]
    tab.problems.clear()


async def test_a_failure_in_mid_stream_is_shown(tab, engine):
    engine.endless, engine.delay = True, 0.01
    await send_message(tab, "hi")
    await tab.wait_until("document.querySelector('.assistant .text')")
    engine.die("out of memory")
    await tab.wait_until("document.querySelector('.error')")
    (error_text,) = await read_texts(tab, ".error")
    assert "out of memory" in error_text


async def test_wrong_key_is_reported_and_right_key_is_used(url, service):
    service.api_keys = ("secret",)
    async with browser.open_tab() as tab:
        await tab.set_screen(1000, 850)
        await tab.open(url)
        await tab.wait_until("document.activeElement === $('key') && !$('settings').hidden")
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.wait_until("!$('key').validity.valid && $('key').validationMessage.includes('Incorrect API key')")
        await tab.evaluate("$('key').select()")
        await tab.type("secret")
        await tab.press("Enter")
        await send_message(tab, "hi")
        await wait_for_answers(tab)
        assert await read_texts(tab, ".assistant .text") == ["Hello"]
        assert await tab.evaluate("JSON.stringify({...sessionStorage})") == '{"nanovllm-key":"secret"}'
        assert await tab.evaluate("localStorage.length + document.cookie.length") == 0
        await tab.open(url)
        await tab.wait_until("$('model').value")
        assert all("401" in problem for problem in tab.problems)


async def test_shown_statistics_are_those_of_the_engine(tab, engine):
    await tab.wait_until("!$('figures').classList.contains('stale')")
    engine.stats = EngineStats(
        num_requests_running=3, num_requests_waiting=2, num_blocks=10, num_free_blocks=4, generation_tokens=5000
    )
    await tab.wait_until("$('running').textContent === '3' && $('waiting').textContent === '2'")
    assert await tab.evaluate("$('cache').textContent") == "60.0%"
    assert float(await tab.evaluate("$('rate').textContent")) > 100
    await send_message(tab, "hi")
    await wait_for_answers(tab)
    await tab.wait_until("/^\\d+ ms$/.test($('ttft').textContent)")


async def test_shown_share_of_cached_prompts_names_the_tiers(tab, engine):
    await tab.wait_until("!$('figures').classList.contains('stale')")
    assert await tab.evaluate("$('hits').textContent") == "\N{EN DASH}"
    engine.stats = EngineStats(num_queried_prompt_tokens=1000, num_cached_prompt_tokens=620)
    await tab.wait_until("$('hits').textContent === '62%'")
    tiers = (("host", 200), ("disk", 50))
    engine.stats = EngineStats(num_queried_prompt_tokens=1000, num_cached_prompt_tokens=620, loaded_tokens=tiers)
    await tab.wait_until("$('hits').textContent === '62% (host 20%, disk 5%)'")


async def test_text_has_contrast_and_fits_on_small_screens(tab):
    await send_message(tab, "hi")
    await wait_for_answers(tab)
    for dark in (False, True):
        await tab.set_screen(1300, 850, dark=dark)
        text_colour, background_colour = await tab.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert (brightness(background_colour) < brightness(text_colour)) is dark
        assert contrast(text_colour, background_colour) > 7
        note_colour = await tab.evaluate("getComputedStyle(document.querySelector('.note')).color")
        assert contrast(note_colour, background_colour) > 4.5
    await tab.set_screen(380, 700)
    assert await tab.evaluate("document.documentElement.scrollWidth") <= 380
    await tab.click("#toggle")
    await tab.wait_until("$('settings').hidden !== ($('toggle').getAttribute('aria-expanded') === 'true')")
    assert await tab.evaluate("document.documentElement.scrollWidth") <= 380


def brightness(colour):
    """WCAG's relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour, other_colour):
    darker, lighter = sorted((brightness(colour), brightness(other_colour)))
    return (lighter + 0.05) / (darker + 0.05)
