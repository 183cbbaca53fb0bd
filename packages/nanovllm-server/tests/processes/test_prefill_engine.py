import asyncio
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm_core import ConfigError, EngineConfig, EngineDeadError
from nanovllm_core.cache.shared_directory import load_secret
from nanovllm_models import ModelDirectory
from nanovllm_server.processes import prefill_engine as module
from nanovllm_server.processes.engine_recipe import EngineRecipe
from nanovllm_server.processes.prefill_engine import (
    PrefillEngine,
    TransferDirectory,
    compute_restart_delay_s,
    start_prefill_engine,
)
from nanovllm_server.settings import TransferSettings

CONFIG = EngineConfig(tensor_parallel_size=2, kv_offload_gib=0.5, trace=Path("steps.json"))
RECIPE = EngineRecipe(ModelDirectory(Path("model"), "model"), None, "auto", "text", "error", CONFIG)


class FakeClient:
    def __init__(self) -> None:
        self.death_reason: str | None = None
        self.is_stopped = False

    async def stop(self) -> None:
        self.is_stopped = True


class FakeEngines:
    def __init__(self) -> None:
        self.recipes: list[EngineRecipe] = []
        self.clients: list[FakeClient] = []
        self.failures: list[Exception] = []
        self.is_slow = False

    def start_process(self, recipe: EngineRecipe) -> SimpleNamespace:
        self.recipes.append(recipe)
        return SimpleNamespace(pid=len(self.recipes))

    async def adopt(self, process: SimpleNamespace) -> FakeClient:
        if self.is_slow:
            await asyncio.Event().wait()
        if self.failures:
            raise self.failures.pop(0)
        self.clients.append(FakeClient())
        return self.clients[-1]


@pytest.fixture
def engines(monkeypatch) -> FakeEngines:
    engines = FakeEngines()
    monkeypatch.setattr(module, "EngineProcess", engines.start_process)
    monkeypatch.setattr(module, "EngineClient", SimpleNamespace(adopt=engines.adopt))
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    return engines


async def wait_until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_directory_has_a_new_secret_that_only_this_user_can_read():
    directory, other = TransferDirectory(), TransferDirectory()
    try:
        secret = directory.secret_file.read_bytes()
        assert len(secret) == 32
        assert secret != other.secret_file.read_bytes()
        assert stat.S_IMODE(directory.secret_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert directory.address == f"ipc://{directory.path}/transfer"
    finally:
        directory.remove()
        other.remove()
    assert not directory.path.exists()
    directory.remove()


async def test_two_engines_share_address_secret_and_settings(engines):
    settings = TransferSettings(has_prefill_engine=True, prefill_gpus="0,1", decode_gpus="2,3")
    decode, prefill_engine = start_prefill_engine(RECIPE, settings)
    await prefill_engine.start_task
    (prefill,) = engines.recipes
    address = prefill.engine_config.transfer_listen
    assert address is not None
    secret_file = Path(address.removeprefix("ipc://")).with_name("secret")
    common = {"tensor_parallel_size": 2, "kv_offload_gib": 0.5, "transfer_secret_file": secret_file}
    assert prefill.engine_config == EngineConfig(**common, transfer_listen=address)
    assert decode.engine_config == EngineConfig(
        **common, transfer_peers=(address,), prefill_peer=address, trace=Path("steps.json")
    )
    assert (prefill.visible_gpus, decode.visible_gpus) == ("0,1", "2,3")
    assert prefill.private_directory == decode.private_directory == secret_file.parent
    await prefill_engine.stop()
    assert engines.clients[0].is_stopped
    assert not secret_file.parent.exists()


async def test_engines_use_the_secret_of_the_directory_of_block_files(engines, tmp_path):
    config = EngineConfig(kv_offload_gib=0.5, kv_offload_dir=tmp_path / "kv")
    secrets = set[bytes]()
    for _ in range(2):
        recipe = replace(RECIPE, engine_config=config)
        decode, prefill_engine = start_prefill_engine(recipe, TransferSettings(has_prefill_engine=True))
        secrets.add(decode.engine_config.transfer_secret_file.read_bytes())
        await prefill_engine.stop()
    assert secrets == {load_secret(tmp_path / "kv")}


@pytest.mark.parametrize("error", [ConfigError("too few blocks"), EngineDeadError("out of memory")], ids=repr)
async def test_error_of_a_failed_first_start_is_raised(engines, error):
    engines.failures.append(error)
    _, prefill_engine = start_prefill_engine(RECIPE, TransferSettings(has_prefill_engine=True))
    with pytest.raises(type(error), match=str(error)):
        await prefill_engine.start_task
    await prefill_engine.stop()


async def test_dead_engine_is_restarted_with_the_same_recipe(engines):
    directory = TransferDirectory()
    prefill_engine = PrefillEngine(RECIPE, directory)
    await prefill_engine.start_task
    prefill_engine.keep_running()
    engines.failures += [EngineDeadError("died again"), ConfigError("no memory")]
    engines.clients[0].death_reason = "killed"
    await wait_until(lambda: len(engines.clients) == 2)
    assert engines.clients[0].is_stopped
    assert engines.recipes == [RECIPE] * 4
    await prefill_engine.stop()
    assert engines.clients[1].is_stopped
    assert not directory.path.exists()


async def test_log_says_that_the_engine_died(engines):
    prefill_engine = PrefillEngine(RECIPE, TransferDirectory())
    records = []
    prefill_engine._logger = SimpleNamespace(
        info=lambda event, **fields: records.append((event, fields)),
        error=lambda event, **fields: records.append((event, fields)),
    )
    await prefill_engine.start_task
    prefill_engine.keep_running()
    engines.clients[0].death_reason = "killed"
    await wait_until(lambda: len(records) == 3)
    await prefill_engine.stop()
    assert records == [
        ("prefill engine started", {"pid": 1}),
        ("prefill engine died", {"reason": "killed", "restart_delay_s": 0.001}),
        ("prefill engine started", {"pid": 2}),
    ]


@pytest.mark.parametrize("is_restart", [False, True])
async def test_stop_cancels_a_start(engines, is_restart):
    directory = TransferDirectory()
    engines.is_slow = not is_restart
    prefill_engine = PrefillEngine(RECIPE, directory)
    if is_restart:
        await prefill_engine.start_task
        prefill_engine.keep_running()
        engines.is_slow = True
        engines.clients[0].death_reason = "killed"
    await wait_until(lambda: len(engines.recipes) == 1 + is_restart)
    await prefill_engine.stop()
    assert not directory.path.exists()
    assert all(client.is_stopped for client in engines.clients)


def test_delays_double_and_end_at_a_minute():
    delays = [0.0]
    for _ in range(9):
        delays.append(compute_restart_delay_s(delays[-1], served_s=59))
    assert delays[1:] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert compute_restart_delay_s(60, served_s=60) == 1


def test_recipe_sets_the_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    gpus_during_load = []
    monkeypatch.setattr(
        "nanovllm_models.load", lambda *_, **__: gpus_during_load.append(module.os.environ["CUDA_VISIBLE_DEVICES"])
    )
    module.replace(RECIPE, visible_gpus="2")()
    RECIPE()
    assert gpus_during_load == ["2", "2"]
