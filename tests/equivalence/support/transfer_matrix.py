"""Compares engines that fetch blocks with engines that compute them: `python transfer_matrix.py [--carriers C ...]`.

The program runs every carrier and setting with every tiny model. test_transfers.py runs a sample.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rank_matrix import write_tiny_checkpoint
from tiny_models import AMPLE_CACHE, SCARCE_CACHE, TINY_MODELS, generate, make_predictions
from transfer_pairs import CARRIERS, allow_long_silence, wait_until, write_secret

from nanovllm_core import AsyncEngine, Engine, EngineClient, EngineConfig, EngineStats
from nanovllm_core.engine import build
from nanovllm_core.scheduling.draft_times import DraftTimes
from nanovllm_models import load

HOST_MEMORY = {"kv_offload_gib": 0.05}
# FILES stands for a directory of each engine.
FILES = "files"
TRANSFER_SETTINGS = {
    "all at once": AMPLE_CACHE,
    "chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, **AMPLE_CACHE},
    "preempted": SCARCE_CACHE,
    "preempted, files": {**SCARCE_CACHE, "kv_offload_gib": 0.0004, "kv_offload_dir": FILES},
    "FP8 cache, chunked": {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 40, **AMPLE_CACHE},
    "two ranks": {"tensor_parallel_size": 2, **AMPLE_CACHE},
    "own requests": {"tensor_parallel_size": 2, "dp_attention": True, **AMPLE_CACHE},
    "n-grams": {"speculate": "ngram", **AMPLE_CACHE},
    "MTP heads": {"speculate": "mtp", "max_num_seqs": 2, "num_blocks": 400},
}
SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.9, "presence_penalty": 0.5, "logprobs": 2},
)


def can_run(name: str, setting: str) -> bool:
    return setting != "MTP heads" or TINY_MODELS[name].has_mtp


async def compare(path: Path, device: str, setting: str, carrier: str) -> EngineStats:
    settings, is_preempted = TRANSFER_SETTINGS[setting], "preempted" in setting
    settings_of_single_engine = {
        key: value for key, value in settings.items() if key not in ("kv_offload_gib", "kv_offload_dir", "speculate")
    }
    options: dict[str, Any] = {"is_preempted": is_preempted, "samplings": SAMPLINGS}
    expected = await generate(path, device, settings_of_single_engine, **options)
    if settings.get("speculate") == "ngram":
        options["predictions"] = make_predictions(expected)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        # All measured times are 0, so steps propose as many drafts as possible.
        patch.setattr(build, "measure_draft_times", lambda *_: DraftTimes())
        allow_long_silence(patch)
        secret = write_secret(Path(directory, "secret"))
        transfer_options = {"transfer_secret_file": secret, "transfer_carrier": carrier}
        shared_settings = HOST_MEMORY | settings | transfer_options

        def make_file_settings(name: str) -> dict[str, Path]:
            return {"kv_offload_dir": Path(directory, name)} if "kv_offload_dir" in shared_settings else {}

        address = f"ipc://{directory}/transfer"
        prefill_settings = {"depth": 2, **shared_settings, "transfer_listen": address, **make_file_settings("prefill")}
        # A process can hold the ranks of only one engine.
        start = AsyncEngine.start if settings.get("tensor_parallel_size", 1) == 1 else EngineClient.launch
        prefill = await start(load(path), EngineConfig(device=device, dtype="float32", **prefill_settings))
        stats: list[EngineStats] = []
        try:
            decode_settings = {
                **shared_settings,
                "transfer_peers": (address,),
                "prefill_peer": address,
                **make_file_settings("decode"),
            }
            # Files may stay unused, because the host memory holds all blocks of some models.
            options |= {"optional_tiers": ("disk",), "prepare": await_peer, "final_stats": stats}
            found = await generate(path, device, decode_settings, **options)
            await await_idle(prefill)
        finally:
            await prefill.stop()
    assert found == expected
    assert stats[0].fetched_tokens > 0, stats[0].fetches
    return stats[0]


async def await_peer(engine: AsyncEngine) -> None:
    files = engine._loop._scheduler.tier.files
    await wait_until(lambda: files is None or all(store.indexed.is_set() for store in files._stores))
    await wait_until(lambda: all(peer.is_ready for peer in engine._loop._transfers._peers.values()))


async def await_idle(engine: Engine) -> None:
    await wait_until(lambda: engine.stats.num_leases == 0 and engine.stats.num_free_blocks == engine.stats.num_blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--carriers", nargs="+", default=CARRIERS, choices=CARRIERS)
    parser.add_argument("--models", nargs="+", default=list(TINY_MODELS), choices=TINY_MODELS)
    parser.add_argument("--settings", nargs="+", default=list(TRANSFER_SETTINGS), choices=TRANSFER_SETTINGS)
    arguments = parser.parse_args()
    num_failures = 0
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as directory:
            write_tiny_checkpoint(name, Path(directory))
            for setting in filter(lambda setting, name=name: can_run(name, setting), arguments.settings):
                for carrier in arguments.carriers:
                    try:
                        stats = asyncio.run(compare(Path(directory), arguments.device, setting, carrier))
                        result = f"equal, {stats.fetched_tokens} tokens fetched"
                    except AssertionError as error:
                        result = f"DIFFERENT {error}"
                    except ValueError as error:
                        # The ranks can't share the heads or experts of some tiny models.
                        result = f"refused: {error}"
                    num_failures += result.startswith("DIFFERENT")
                    print(f"{name} | {setting} | {carrier} | {result}", flush=True)
    raise SystemExit(f"{num_failures} runs gave other tokens or fetched nothing" if num_failures else 0)


if __name__ == "__main__":
    main()
