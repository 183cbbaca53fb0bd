"""Processes that start an engine and are then killed. On the path, as the engine's process must import the recipe."""

import asyncio
import sys
import time
from functools import partial
from pathlib import Path

from toy_model import toy_spec

from nanovllm_core import EngineClient, EngineConfig, EngineProcess, ModelSpec


def slow_recipe(begun: Path) -> tuple[ModelSpec, EngineConfig]:
    begun.touch()
    time.sleep(600)
    return quick_recipe()


def quick_recipe() -> tuple[ModelSpec, EngineConfig]:
    return toy_spec(), EngineConfig(device="cpu", num_blocks=16, max_num_seqs=2)


async def main(phase: str, begun: Path) -> None:
    """Start an engine, print its process id, and never end; `begun` exists once the engine is in `phase`."""
    engine = EngineProcess(partial(slow_recipe, begun) if phase == "loading" else quick_recipe)
    print(engine.pid, flush=True)
    if phase == "serving":
        await EngineClient.adopt(engine)
        await asyncio.to_thread(begun.touch)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
