from dataclasses import replace

import pytest

from nanovllm_server import cli
from nanovllm_server.processes.server import format_banner


@pytest.fixture
def banner(engine):
    def make(host, *flags):
        return format_banner(engine.info, cli.make_settings(cli.make_parser().parse_args(flags)), host, 8000)

    return make


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("0.0.0.0", "http://127.0.0.1:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:8000/"),
    ],
)
def test_the_banner_has_the_url_of_the_page(banner, host, url):
    assert f"\n  page     {url}\n" in banner(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "fe80::1%eth0"])
def test_a_public_address_without_a_key_is_a_warning(banner, host, monkeypatch):
    monkeypatch.delenv(cli.API_KEY_VARIABLE, raising=False)
    assert f"\n  warning  {host} accepts other machines" in banner(host)
    assert "warning" not in banner(host, "--api-key", "secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_a_loopback_address_needs_no_warning(banner, host):
    assert "warning" not in banner(host)


@pytest.mark.parametrize(
    ("flags", "info_changes", "line"),
    [
        ("--role prefill", {"transfer_address": "127.0.0.1:5600"}, "listens on 127.0.0.1:5600"),
        ("--role decode --transfer-peers a:1,b:2", {"transfer_peers": ("a:1", "b:2")}, "fetches from a:1, b:2"),
    ],
)
def test_the_banner_says_with_which_engines_blocks_are_transferred(banner, engine, flags, info_changes, line):
    engine.info = replace(engine.info, **info_changes)
    assert f"\n  transfer {line}\n\ncurl" in banner("127.0.0.1", *flags.split(), "--transfer-secret-file", "secret")


def test_the_banner_names_the_second_engine(banner, engine):
    engine.info = replace(engine.info, transfer_peers=("ipc:///tmp/transfer",))
    flags = ("--prefill-gpus", "1", "--decode-gpus", "1", "--device", "cpu")
    assert "\n  transfer a second engine computes long prompts\n\ncurl" in banner("127.0.0.1", *flags)


def test_the_banner_of_a_single_engine_names_no_transfer(banner):
    assert "transfer" not in banner("127.0.0.1")
