"""Checks of the headers Host (against DNS rebinding) and Origin."""

import asyncio
import json
import socket

import pytest
from loopback import connect

from nanovllm_server import cli
from nanovllm_server.http.app import create_app
from nanovllm_server.http.cross_origin import parse_allowed_origins
from nanovllm_server.http.host_check import HostCheck, parse_allowed_hosts
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.settings import SettingsError

ORIGIN = "https://app.example.com"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def refusal(host: str, *names: str) -> ApiError | None:
    try:
        HostCheck(names).check(host)
    except ApiError as error:
        return error
    return None


def parse_settings(*arguments):
    return cli.make_settings(cli.make_parser().parse_args(arguments))


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000",
        "10.1.2.3", "[fe80::1]", "0.0.0.0:80", "203.0.113.7", "nanovllm:8000", "my_service", "app.localhost",
        "gpu.local", "a.b.internal", "x.home.arpa", "", ":8000", "127.0.0.1.", "local.",
        "nanovllm.default.svc.cluster.local",
    ],
)  # fmt: skip
def test_addresses_and_private_names_are_allowed(host):
    assert refusal(host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "evillocal.example", "1.2.3", "evil.example.",
        "internal.evil", "xn--e1aybc.example", "1.2.3.4.5", "0x7f.1", "a.local.evil.example",
    ],
)  # fmt: skip
def test_name_that_a_web_site_can_own_is_refused(host):
    error = refusal(host)
    assert error is not None
    assert (error.status, error.code) == (403, "host_not_allowed")
    assert "--allowed-hosts" in error.message
    assert host.split(":")[0].removesuffix(".") in error.message


@pytest.mark.parametrize(
    "host",
    ["[::1", "a b", "a/b", "<script>", "a:b", "a:1:2", "a@b", "\xe9.local", "[1:2]x", "a\tb", "a,b/c", "http://a"],
)
def test_malformed_host_is_a_400(host):
    for names in ((), ("*",)):
        error = refusal(host, *names)
        assert error is not None
        assert (error.status, error.code) == (400, "invalid_http")


def test_long_host_gets_a_short_message():
    error = refusal("x." * 5000)
    assert error is not None
    assert len(error.message) < 400


def test_names_patterns_and_a_star_allow_hosts():
    assert refusal("Api.Example.com:443", "api.example.com") is None
    assert refusal("other.example.com", "api.example.com") is not None
    assert refusal("a.b.example.com", "*.Example.com") is None
    assert refusal("example.com", "*.example.com") is not None
    assert refusal("notexample.com", "*.example.com") is not None
    assert refusal("any.thing.example", "*") is None


def test_allowed_hosts_depend_on_flags_and_keys():
    names = parse_settings("--allowed-hosts", "a.example, *.b.example", "--allowed-hosts", "c.example").allowed_hosts
    assert names == ("a.example", "*.b.example", "c.example", "127.0.0.1", socket.gethostname())
    assert parse_settings("--host", "gpu.example").allowed_hosts == ("gpu.example", socket.gethostname())
    assert "*" in parse_settings("--api-key", "secret").allowed_hosts
    assert "*" not in parse_settings("--api-key", "secret", "--allowed-hosts", "a.example").allowed_hosts


@pytest.mark.parametrize("value", ["http://a.example", "a.example:8000", "a.example/x", "a b", "a.*.example", "**"])
def test_malformed_allowed_host_is_refused(value):
    with pytest.raises(ValueError, match="is not a host"):
        parse_allowed_hosts([value])
    with pytest.raises(SettingsError, match="is not a host"):
        parse_settings("--allowed-hosts", value)


def cross_origin_headers(response) -> list[str]:
    return [name for name, _ in response.headers if name.startswith("Access-Control-")]


async def send(url: str, host: str, path: str = "/v1/models", *, version: str = "1.1") -> tuple[int, dict]:
    reader, writer = await connect(url)
    headers = f"Host: {host}\r\n" if host else ""
    writer.write(f"GET {path} HTTP/{version}\r\n{headers}Connection: close\r\n\r\n".encode())
    async with asyncio.timeout(30):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body) if b"application/json" in head else {}


async def test_every_path_checks_the_host_before_the_key(url, service):
    service.api_keys = ("secret",)
    for path in ("/", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/chat/completions", "/nothing"):
        status, body = await send(url, "evil.example:8000", path)
        assert status == 403
        assert body["error"]["code"] == "host_not_allowed"
        assert '"evil.example"' in body["error"]["message"]
    assert (await send(url, "localhost:8000", "/health"))[0] == 200
    assert (await send(url, "localhost:8000"))[0] == 401


async def test_http_1_0_needs_no_host(url):
    assert (await send(url, "", "/health", version="1.0"))[0] == 200


@pytest.mark.parametrize(
    ("value", "origin"),
    [
        ("https://App.Example.com/", "https://app.example.com"),
        ("https://app.example.com:443", "https://app.example.com"),
        ("http://localhost:5173", "http://localhost:5173"),
        ("http://[::1]:80", "http://[::1]"),
        ("tauri://localhost", "tauri://localhost"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_origins_are_written_as_browsers_write_them(value, origin):
    assert parse_allowed_origins([value]) == (origin,)
    assert parse_settings("--allowed-origins", value).allowed_origins == (origin,)


@pytest.mark.parametrize("value", ["app.example.com", "https://app.example.com/path", "https://*.example.com", "//a"])
def test_malformed_origin_is_refused(value):
    with pytest.raises(SettingsError, match="is not an origin"):
        parse_settings("--allowed-origins", value)


@pytest.fixture
def browser(service):
    service.allowed_origins = (ORIGIN, "http://localhost:5173")
    service.api_keys = ("secret",)
    return create_app(service).test_client()


async def test_preflight_of_an_allowed_origin_needs_no_key(browser):
    response = await browser.options("/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 204
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "POST" in response.headers["Access-Control-Allow-Methods"]
    assert response.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "Origin" in response.headers["Vary"]


@pytest.mark.parametrize("origin", ["https://evil.example", "http://app.example.com", ORIGIN + ":8443", "null", ""])
async def test_other_origins_get_no_permission(browser, origin):
    response = await browser.options("/v1/chat/completions", headers={**PREFLIGHT, "Origin": origin})
    assert response.status_code == 401
    assert cross_origin_headers(response) == []
    assert response.headers["Vary"] == "Origin"
    response = await browser.get("/health", headers={"Origin": origin})
    assert cross_origin_headers(response) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_allowed_origin_can_read_answers_and_errors(browser, stream):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    for headers, status in (({"Authorization": "Bearer secret"}, 200), ({}, 401)):
        response = await browser.post("/v1/chat/completions", json=body, headers={"Origin": ORIGIN, **headers})
        assert response.status_code == status
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        await response.get_data()
    assert (await browser.get("/nothing", headers={"Origin": ORIGIN})).headers["Access-Control-Allow-Origin"] == ORIGIN


async def test_star_allows_every_origin(service):
    service.allowed_origins = ("*",)
    browser = create_app(service).test_client()
    for origin in ("https://a.example", "null"):
        response = await browser.options("/v1/models", headers={**PREFLIGHT, "Origin": origin})
        assert response.status_code == 204
        assert response.headers["Access-Control-Allow-Origin"] == origin


async def test_no_origin_is_allowed_by_default(service):
    assert service.allowed_origins == parse_settings().allowed_origins == ()
    response = await create_app(service).test_client().options("/v1/chat/completions", headers=PREFLIGHT)
    assert cross_origin_headers(response) == []
    assert "Vary" not in response.headers
