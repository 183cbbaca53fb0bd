"""A server from this checkout, a server from wheels, and the proxies of `docs/deploy`."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from installation import InstalledServer, build_wheels, start_from_wheels
from proxies import KEY, run_caddy, run_nginx

SMALL = ("--max-model-len", "512", "--cpu-cache-gib", "0.05", "--max-num-seqs", "4", "--max-queue", "0")


@pytest.fixture(scope="session")
def server_flags() -> tuple[str, ...]:
    return (*SMALL, "--api-key", KEY, "--allowed-hosts", "llm.example.com")


@pytest.fixture(scope="session")
def server(run_server: Callable, default_model: Path, server_flags: tuple[str, ...]) -> Iterator:
    with run_server(default_model, *server_flags) as server:
        yield server


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def installed(
    wheels: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    run_server: Callable,
    server_flags: tuple[str, ...],
) -> Iterator[Future[InstalledServer]]:
    """Starts a server from wheels while other tests run, because the start takes long."""
    folder = tmp_path_factory.mktemp("installed")
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        yield thread.submit(start_from_wheels, wheels, folder, run_server, server_flags, stack)


@pytest.fixture(scope="session")
def nginx(server, tmp_path_factory) -> Iterator[str]:
    with run_nginx(tmp_path_factory.mktemp("nginx"), [server.url]) as url:
        yield url


@pytest.fixture(scope="session")
def caddy(server, tmp_path_factory) -> Iterator[str]:
    with run_caddy(tmp_path_factory.mktemp("caddy"), [server.url]) as url:
        yield url
