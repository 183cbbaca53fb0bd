"""The chat page at `/`. Its headers forbid requests to other servers."""

import base64
import hashlib
import re
from importlib import resources

# Directives of the Content-Security-Policy.
CONTENT_POLICY = {
    "default-src": "'none'",
    "script-src": "",
    "style-src": "",
    "connect-src": "'self'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # A model's output may be hostile: the browser refuses to parse any text as HTML.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


def read_page() -> tuple[bytes, dict[str, str]]:
    """Returns (page: HTML, headers: values by name). The headers allow only the page's script and style, by hash."""
    html = resources.files("nanovllm_server.http").joinpath("page.html").read_bytes()
    policy = CONTENT_POLICY | {"script-src": _hash_source(html, b"script"), "style-src": _hash_source(html, b"style")}
    return html, {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash_source(html: bytes, tag: bytes) -> str:
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
