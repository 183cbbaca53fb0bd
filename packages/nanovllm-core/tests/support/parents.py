"""A program that starts an engine and is then killed."""

import asyncio
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from toy_model import toy_spec
from tqdm import tqdm

from nanovllm_core import EngineClient, EngineConfig, EngineProcess, ModelSpec
from nanovllm_core.model import BuildContext, CausalLM


def load_slowly(begun_path: Path) -> tuple[ModelSpec, EngineConfig]:
    with tqdm(disable=True):  # as models do when they load
        begun_path.touch()
        time.sleep(600)
    return load_quickly()


def build_with_progress_bar(build: BuildContext) -> CausalLM:
    with tqdm(disable=True):  # as models do when they load
        return toy_spec().build(build)


def load_quickly(num_ranks: int = 1) -> tuple[ModelSpec, EngineConfig]:
    return toy_spec(), EngineConfig(device="cpu", num_blocks=16, max_num_seqs=2, tensor_parallel_size=num_ranks)


def wait_for_ranks(begun_path: Path) -> None:
    while not any(Path(tempfile.gettempdir()).rglob("nanovllm-ranks-*")):
        time.sleep(0.01)
    begun_path.touch()


async def main(phase: str, begun_path: Path) -> None:
    """Create `begun_path` when the engine is in `phase`."""
    loaders = {
        "loading": partial(load_slowly, begun_path),
        "starting ranks": partial(load_quickly, num_ranks=2),
        "serving": load_quickly,
    }
    engine = EngineProcess(loaders[phase])
    print(engine.pid, flush=True)
    if phase == "starting ranks":
        await asyncio.to_thread(wait_for_ranks, begun_path)
    if phase == "serving":
        await EngineClient.adopt(engine)
        await asyncio.to_thread(begun_path.touch)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
