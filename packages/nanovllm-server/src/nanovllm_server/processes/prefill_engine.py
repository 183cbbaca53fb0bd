"""Starts the engine that computes long prompts for the server's main engine, and restarts it when it dies."""

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from nanovllm_core import EngineClient, EngineProcess
from nanovllm_core.cache.shared_directory import load_secret
from nanovllm_server.observability.logs import get_logger
from nanovllm_server.processes.engine_recipe import EngineRecipe
from nanovllm_server.settings import TransferSettings

SECRET_BYTES = 32
FIRST_BACKOFF_S = 1.0  # delay of the first restart; each further delay is twice the last, up to MAX_BACKOFF_S
MAX_BACKOFF_S = 60.0
# An engine that served for at least this time before it died is restarted after FIRST_BACKOFF_S.
STABLE_RUN_S = 60.0
POLL_INTERVAL_S = 0.25  # time between two checks for an engine's death


class TransferDirectory:
    """A private directory with the socket and the secret of two engines. secret: None for a new secret."""

    def __init__(self, secret: bytes | None = None):
        # Only this user may enter the directory (mode 0700).
        self._directory = tempfile.TemporaryDirectory(prefix="nanovllm-transfer-")
        self.path = Path(self._directory.name)
        self.secret_file = self.path / "secret"
        self._socket = self.path / "transfer"
        descriptor = os.open(self.secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor has no path)
            file.write(secret or os.urandom(SECRET_BYTES))

    @property
    def address(self) -> str:
        """Address at which one engine lets the other engine fetch blocks."""
        return f"ipc://{self._socket}"

    def remove(self) -> None:
        """Removes the directory. Further calls do nothing."""
        self._directory.cleanup()


class PrefillEngine:
    """Runs an engine that computes prompts for another engine. Must be created in an event loop.

    start_task: done when the engine serves; has ConfigError or EngineDeadError if the first start fails.
    """

    def __init__(self, recipe: EngineRecipe, directory: TransferDirectory):
        self._recipe = recipe
        self._directory = directory
        self._client: EngineClient | None = None
        self._logger = get_logger("nanovllm")
        self.start_task = asyncio.create_task(self._start())
        self._restart_task: asyncio.Task[None] | None = None

    def keep_running(self) -> None:
        """Restarts the engine from now on when it dies. Requires that `start_task` has succeeded."""
        self._restart_task = asyncio.create_task(self._restart_when_dead())

    async def stop(self) -> None:
        """Stops the engine, even while it starts, and removes the directory."""
        tasks = [self.start_task] if self._restart_task is None else [self.start_task, self._restart_task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.stop()
        self._directory.remove()

    async def _start(self) -> None:
        process = EngineProcess(self._recipe)
        self._client = await EngineClient.adopt(process)
        self._logger.info("prefill engine started", pid=process.pid)

    async def _restart_when_dead(self) -> None:
        backoff_s = 0.0
        while True:
            reason, served_s = await self._serve_until_death()
            backoff_s = compute_restart_delay_s(backoff_s, served_s)
            self._logger.error("prefill engine died", reason=reason, restart_delay_s=backoff_s)
            await asyncio.sleep(backoff_s)

    async def _serve_until_death(self) -> tuple[str, float]:
        """Starts the engine unless the engine runs. Waits for its death. Returns (reason, seconds since the start)."""
        if self._client is None:
            try:
                await self._start()
            except Exception as error:  # noqa: BLE001 (the server also works without a prefill engine)
                return f"{type(error).__name__}: {error}", 0.0
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        assert self._client is not None  # noqa: S101 (`_start` has set the client)
        reason = await wait_for_death(self._client)
        served_s = loop.time() - begin_s
        await self._client.stop()
        self._client = None
        return reason, served_s


def start_prefill_engine(recipe: EngineRecipe, settings: TransferSettings) -> tuple[EngineRecipe, PrefillEngine]:
    """Returns (recipe of the decode engine, prefill engine). Starts the prefill engine.

    recipe: recipe of a single engine. Raises ConfigError if `kv_offload_dir` can't be used.
    """
    offload_dir = recipe.engine_config.kv_offload_dir
    # Block hashes depend on the secret. With the secret in kv_offload_dir, a later server finds this server's files.
    directory = TransferDirectory(None if offload_dir is None else load_secret(offload_dir))
    config = replace(recipe.engine_config, transfer_secret_file=directory.secret_file)
    prefill_config = replace(config, transfer_listen=directory.address, trace=None)
    decode_config = replace(config, transfer_peers=(directory.address,), prefill_peer=directory.address)
    recipe = replace(recipe, private_directory=directory.path)
    prefill_recipe = replace(recipe, engine_config=prefill_config, visible_gpus=settings.prefill_gpus)
    decode_recipe = replace(recipe, engine_config=decode_config, visible_gpus=settings.decode_gpus)
    return decode_recipe, PrefillEngine(prefill_recipe, directory)


async def wait_for_death(engine: EngineClient) -> str:
    """Waits until the engine is dead. Returns the reason."""
    # Poll, because `EngineClient` has no event for the engine's death.
    while engine.death_reason is None:  # noqa: ASYNC110
        await asyncio.sleep(POLL_INTERVAL_S)
    return engine.death_reason


def compute_restart_delay_s(last_backoff_s: float, served_s: float) -> float:
    """Returns the delay before a restart. last_backoff_s: the last delay; 0 if none."""
    if served_s >= STABLE_RUN_S or not last_backoff_s:
        return FIRST_BACKOFF_S
    return min(2 * last_backoff_s, MAX_BACKOFF_S)
