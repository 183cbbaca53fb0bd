"""The chat page at `/`. The page's headers forbid requests to other servers."""

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

FILE_REFERENCE = re.compile(
    rb'<script src="(?P<script>[^"]+)"></script>|<link rel="stylesheet" href="(?P<style>[^"]+)">'
)


def read_page() -> tuple[bytes, dict[str, str]]:
    """Returns (HTML of the page, header values by name). The page contains its scripts and its style.

    The headers allow only these scripts and this style, by hash.
    """
    files = resources.files("nanovllm_server.http").joinpath("page_files")
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def insert_file(match: re.Match[bytes]) -> bytes:
        name = (match["script"] or match["style"]).decode()
        tag = "script" if match["script"] else "style"
        content = b"\n" + files.joinpath(name).read_bytes()
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return b"<%b>%b</%b>" % (tag.encode(), content, tag.encode())

    html = FILE_REFERENCE.sub(insert_file, files.joinpath("page.html").read_bytes())
    policy = CONTENT_POLICY | {f"{tag}-src": " ".join(values) for tag, values in hashes.items()}
    return html, {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
