import hashlib
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import cast
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_loopback"


class HubHandler(BaseHTTPRequestHandler):
    @property
    def _hub(self) -> "LoopbackHub":
        return cast(LoopbackHub, self.server)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Write nothing: the tests' output has no access log."""

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if "org/gated" in path:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        elif "org/private" in path and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif "org/refused" in path:
            self._send(451, b"{}", {"X-Error-Message": "not available in your country"}, with_body=with_body)
        elif "org/broken" in path:
            self.close_connection = True
        elif not any(name in path for name in ("org/model", "org/private")):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif "/revision/" in path:
            if path.rpartition("/")[2] in ("main", "v1.0", COMMIT):
                self._send_json({"id": "org/model", "sha": COMMIT, "siblings": []}, with_body=with_body)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self._hub.files.items()
            ]
            self._send_json(tree, with_body=with_body)
        else:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            if with_body:
                self._hub.requested_files.append(name)
                self._hub.may_send.wait()
            etag = hashlib.sha1(self._hub.files[name]).hexdigest()
            self._send(200, self._hub.files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, with_body=with_body)

    def _send_json(self, value: object, *, with_body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


class LoopbackHub(ThreadingHTTPServer):
    """Serves the repositories `org/model` and `org/private` on a loopback address. Other requests fail.

    requested_files: names of the files that were sent, or that wait until `may_send` is set.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], cache: Path):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.requested_files: list[str] = []
        self.may_send = Event()
        self.may_send.set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
        }


@contextmanager
def run_hub(files: dict[str, bytes], cache: Path) -> Generator[LoopbackHub]:
    """cache: directory of the client's cache."""
    with LoopbackHub(files, cache) as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.may_send.set()
            hub.shutdown()
            thread.join()
