"""Makes pairs of engines: a prefill engine, and a decode engine that fetches blocks from it."""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import toy_model

from nanovllm_core import AsyncEngine, EngineConfig, GrammarSpec, ModelSpec, Request, SamplingParams
from nanovllm_core.transfer import fetches, prefix_client, prefix_server
from nanovllm_core.transfer.prefix_client import PeerConnection

CONFIG = EngineConfig(device="cpu", num_blocks=60, max_num_seqs=4, kv_offload_gib=0.01)
PROMPT_LEN, ANSWER_LEN, BLOCK_SIZE = 100, 6, 16
FETCHED_TOKENS = PROMPT_LEN // BLOCK_SIZE * BLOCK_SIZE
MAX_WAIT_S = 120.0
# A limit that ends a fetch or lease within MAX_WAIT_S could hide an error.
MAX_SILENCE_S = 180.0
CARRIERS = ["shm", "tcp", "nixl"] if sys.platform == "linux" else ["tcp"]


def write_secret(path: Path) -> Path:
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return path


def allow_long_silence(patch: pytest.MonkeyPatch) -> None:
    """Let fetches wait long for a peer: a busy machine may stop the engines' process for seconds."""
    patch.setattr(prefix_client, "SILENCE_S", MAX_SILENCE_S)
    patch.setattr(prefix_server, "LEASE_S", MAX_SILENCE_S)
    patch.setattr(prefix_server, "CLIENT_TIMEOUT_S", MAX_SILENCE_S)
    patch.setattr(fetches, "MAX_DELAY_S", MAX_SILENCE_S)


def with_fingerprint(spec: ModelSpec, name: str = "toy") -> ModelSpec:
    draft = None if spec.draft is None else with_fingerprint(spec.draft, name)
    return replace(spec, fingerprint=name, draft=draft)


def make_prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 97) for _ in range(length)]


async def generate(
    engine: AsyncEngine, prompt: list[int], count: int = ANSWER_LEN, grammar: GrammarSpec | None = None, **fields
) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, grammar=grammar)
    request = Request(f"r{random.random()}", prompt, sampling, **fields)
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + MAX_WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


def peer_of(engine: AsyncEngine) -> PeerConnection:
    (peer,) = engine._loop._transfers._peers.values()
    return peer


def outcomes_of(engine: AsyncEngine) -> dict[str, int]:
    return {outcome: count for outcome, count in engine.stats.fetches if count}


async def check_idle(*engines: AsyncEngine) -> None:
    for engine in engines:
        await wait_until(
            lambda engine=engine: (
                engine.stats.num_free_blocks == engine.stats.num_blocks
                and engine.stats.num_held_host_slots == engine.stats.num_leases == 0
            )
        )


@contextlib.asynccontextmanager
async def start_pair(
    secret: Path, spec: ModelSpec | None = None, *, decode: dict | None = None, awaits_peer: bool = True, **settings
) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    """Yields (prefill engine, decode engine). decode: settings of the decode engine only."""
    spec = with_fingerprint(spec or toy_model.toy_spec())
    config = replace(CONFIG, transfer_secret_file=secret, **settings)
    prefill = await AsyncEngine.start(spec, replace(config, transfer_listen="127.0.0.1:0"))
    address = prefill.info.transfer_address
    config = replace(config, **{"transfer_peers": (address,), "prefill_peer": address} | (decode or {}))
    engine = await AsyncEngine.start(spec, config)
    try:
        if awaits_peer:
            await wait_until(lambda: peer_of(engine).is_ready)
        yield prefill, engine
    finally:
        await engine.stop()
        await prefill.stop()
