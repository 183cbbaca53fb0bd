"""The HTML and the Content-Security-Policy of the chat page."""

import base64
import hashlib
import re

import pytest


@pytest.fixture
async def page(client):
    response = await client.get("/")
    assert response.status_code == 200
    return response, await response.get_data(as_text=True)


def test_page_is_html(page):
    response, text = page
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert text.startswith("<!doctype html>")


async def test_page_needs_no_key(client, service):
    service.api_keys = ("secret",)
    assert (await client.get("/")).status_code == 200


def test_policy_allows_only_the_pages_scripts_and_style(page):
    response, text = page
    policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    for tag in ("script", "style"):
        contents = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert policy[f"{tag}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert "unsafe" not in response.headers["Content-Security-Policy"]


def test_page_loads_nothing_from_elsewhere(page):
    _, text = page
    assert not re.findall(r"@import|url\(", text)
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    # URLs of www.w3.org only name namespaces. Browsers do not load them.
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://(?!www\.w3\.org/)", markup)


def test_no_script_can_parse_text_as_html(page):
    _, text = page
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function", text
    )


def test_every_control_has_a_label(page):
    _, text = page
    for control in re.findall(r"<(?:input|select|textarea)\b[^>]*>", text):
        labelled = "aria-label" in control or re.search(r"<label[^>]*>[^<]*\s*" + re.escape(control), text)
        assert labelled, control
