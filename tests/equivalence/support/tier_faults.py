"""Random faults in the KV blocks that engines keep on disk: `python tier_faults.py [--faults N --seed N --models ...]`.

The engine's cache is small, so most prefixes of returning conversations come from host memory and files. Meanwhile,
files are damaged, the disk is full, the directory disappears, copies fail, and the engine is killed. Each answer must
equal the answer of an engine without tiers. An idle engine must hold no blocks. test_tier_faults.py runs a sample.
"""

import argparse
import asyncio
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from directory_faults import FAULTS, DirectoryFaults, choose_forever, drop_privileges, give_to_unprivileged_user
from rank_matrix import write_tiny_checkpoint
from tiny_models import TINY_MODELS, VOCAB
from torch import Tensor

from nanovllm_core import AsyncEngine, EngineClient, EngineConfig, EngineDeadError, ModelSpec, Request, SamplingParams
from nanovllm_core.cache import block_files
from nanovllm_core.cache.block_files import BlockFiles
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.engine.interface import Engine
from nanovllm_core.engine.process import EngineProcess
from nanovllm_core.execution import entry_copier
from nanovllm_kernels.block_copy import BlockParts, scatter_blocks
from nanovllm_models import load

NUM_CONVERSATIONS, MAX_CONCURRENT, MAX_CONVERSATION_TOKENS, OUTPUT_LEN = 12, 5, 240, 8
COMMON_SETTINGS = {"device": "cpu", "dtype": "float32", "block_size": 16, "max_num_seqs": MAX_CONCURRENT}
TIER_SETTINGS = {"num_blocks": 40, "kv_offload_gib": 0.0004, "kv_offload_disk_gib": 0.0015}
MAX_FAULT_INTERVAL_S = 0.1
MAX_WAIT_S = 120.0
NUM_QUIET_ROUNDS = NUM_CONVERSATIONS // 2
# Faults that last while a file with the fault's name exists beside the directory.
TEMPORARY_FAULTS = ("fill_disk", "fail_copies")
ENGINE_FAULTS = ("kill", *TEMPORARY_FAULTS)
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95})


@dataclass(frozen=True)
class TieredEngineRecipe:
    """Loads the model in the engine's process. Patches inject faults, and make loads and writes more frequent."""

    path: Path
    config: EngineConfig

    def __call__(self) -> tuple[ModelSpec, EngineConfig]:
        drop_privileges()
        block_files._SUSPENSION_S = block_files._SCAN_RETRY_S = 0.05
        # Otherwise the engine loads nothing, because computing a tiny model's prompts is faster.
        CopyTimeModel.predict = lambda *_: 0.0
        write_file = BlockFiles._write_file

        def write_within_free_space(files: BlockFiles, block_hash: bytes, payload: memoryview) -> None:
            is_full = fault_marker(self.config.kv_offload_dir, "fill_disk").exists()
            max_bytes = random.randrange(payload.nbytes) if is_full else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))
            write_file(files, block_hash, payload)

        BlockFiles._write_file = write_within_free_space
        for name in ("gather_blocks", "scatter_blocks"):
            setattr(entry_copier, name, partial(self.copy_or_fail, getattr(entry_copier, name)))
        return load(self.path), self.config

    def copy_or_fail(self, copy: Callable[..., None], parts: BlockParts, blocks: Tensor, rows: Tensor) -> None:
        is_failing = fault_marker(self.config.kv_offload_dir, "fail_copies").exists()
        if is_failing and copy is scatter_blocks:
            rows.fill_(63)
        copy(parts, blocks, rows)
        if is_failing:
            rows.fill_(63)
            raise RuntimeError("an injected failure")


def fault_marker(directory: Path, name: str) -> Path:
    return directory.with_name(name)


@dataclass
class Conversation:
    seed: int
    tokens: list[int] = field(default_factory=list)

    def add_turn(self, rng: random.Random) -> None:
        turn = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(3, 60))]
        if len(self.tokens) + len(turn) + OUTPUT_LEN > MAX_CONVERSATION_TOKENS:
            self.tokens = []
        self.tokens += turn


class Campaign:
    def __init__(self, model: Path, directory: Path, seed: int):
        self._model = model
        self._directory = directory
        self._rng = random.Random(seed)
        self._faults = DirectoryFaults(directory, self._rng)
        self._fault_names = choose_forever([*FAULTS, *ENGINE_FAULTS], self._rng)
        self._conversations = [Conversation(self._rng.getrandbits(31)) for _ in range(NUM_CONVERSATIONS)]
        self._engine: EngineClient | None = None
        self._process: EngineProcess | None = None
        self._is_serving = asyncio.Event()
        self._seeds_without_turn_since_start: set[int] = set()
        self.totals: Counter[str] = Counter()

    async def run(self, num_faults: int) -> None:
        expected_engine = await AsyncEngine.start(load(self._model), EngineConfig(**COMMON_SETTINGS, num_blocks=200))
        try:
            await self._start()
            while sum(self.totals[name] for name in [*FAULTS, *ENGINE_FAULTS]) < num_faults:
                await self._run_turns(expected_engine, num_faults=self._rng.randrange(4))
            # Write files for the next process, because the last faults may have removed all files.
            await self._run_quiet_rounds(expected_engine)
            await self._restart_and_await_scan()
            await self._run_quiet_rounds(expected_engine)
        finally:
            await expected_engine.stop()
            if self._engine is not None:
                await self._engine.stop()

    async def _start(self) -> None:
        config = EngineConfig(**COMMON_SETTINGS, **TIER_SETTINGS, kv_offload_dir=self._directory)
        self._process = EngineProcess(TieredEngineRecipe(self._model, config))
        self._engine = await EngineClient.adopt(self._process)
        self._is_serving.set()
        self._seeds_without_turn_since_start = {conversation.seed for conversation in self._conversations}

    async def _restart(self) -> None:
        self._is_serving.clear()
        self.totals["num_failed_loads"] += self._engine.stats.num_failed_loads
        self._process.kill()
        await self._engine.stop()
        await self._start()

    async def _restart_and_await_scan(self) -> None:
        old_writers = set(self._directory.glob("writer-*"))
        await self._restart()
        # A process writes a file `writer-*` at the end of a scan.
        await wait_until(
            lambda: not old_writers.issuperset(self._directory.glob("writer-*")),
            lambda: "the new process has not scanned the directory",
        )

    async def _run_quiet_rounds(self, expected_engine: Engine) -> None:
        for _ in range(NUM_QUIET_ROUNDS):
            await self._run_turns(expected_engine, num_faults=0)

    async def _run_turns(self, expected_engine: Engine, num_faults: int) -> None:
        conversations = self._rng.sample(self._conversations, self._rng.randrange(1, MAX_CONCURRENT + 1))
        for conversation in conversations:
            conversation.add_turn(self._rng)
        expected = await asyncio.gather(*(generate(expected_engine, conversation) for conversation in conversations))
        answering = asyncio.gather(*map(self._generate, conversations))
        for _ in range(num_faults):
            await asyncio.sleep(self._rng.random() * MAX_FAULT_INTERVAL_S)
            await self._inject_fault()
        found = await answering
        self._seeds_without_turn_since_start -= {conversation.seed for conversation in conversations}
        for conversation, (tokens, _), (found_tokens, num_cached) in zip(conversations, expected, found, strict=True):
            assert found_tokens == tokens, (
                f"after {len(conversation.tokens)} tokens, {num_cached} of them cached, the answer is {found_tokens} "
                f"instead of {tokens}"
            )
            conversation.tokens += tokens
            self.totals["num_turns"] += 1
            self.totals["num_prompt_tokens"] += len(conversation.tokens) - OUTPUT_LEN
            self.totals["num_cached_tokens"] += num_cached
        await self._check_idle()

    async def _generate(self, conversation: Conversation) -> tuple[list[int], int]:
        """Repeats the request if the engine's process was killed."""
        while True:
            await self._is_serving.wait()
            engine = self._engine
            try:
                tokens, num_cached = await generate(engine, conversation)
            except EngineDeadError:
                if engine is self._engine and self._is_serving.is_set():
                    raise
                continue
            if conversation.seed in self._seeds_without_turn_since_start:
                self.totals["num_cached_tokens_after_restart"] += num_cached
            return tokens, num_cached

    async def _inject_fault(self) -> None:
        name = next(self._fault_names)
        if name == "kill":
            await self._restart()
        elif name in TEMPORARY_FAULTS:
            await self._break_for_a_while(name)
        elif not await asyncio.to_thread(self._faults.inject, name):
            return
        self.totals[name] += 1

    async def _break_for_a_while(self, name: str) -> None:
        fault_marker(self._directory, name).touch()
        await asyncio.sleep(self._rng.random() * MAX_FAULT_INTERVAL_S)
        fault_marker(self._directory, name).unlink()

    async def _check_idle(self) -> None:
        def is_idle() -> bool:
            stats, num_slots = self._engine.stats, self._engine.info.num_state_slots
            return (stats.num_free_blocks, stats.num_free_state_slots) == (stats.num_blocks, num_slots)

        await wait_until(is_idle, lambda: f"the idle engine holds blocks or states: {self._engine.stats}")


async def wait_until(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    deadline = time.monotonic() + MAX_WAIT_S
    while not condition():
        assert time.monotonic() < deadline, describe()
        await asyncio.sleep(0.01)


async def generate(engine: Engine, conversation: Conversation) -> tuple[list[int], int]:
    """Returns the answer's tokens and the number of cached prompt tokens."""
    sampling = SamplingParams(
        **SAMPLINGS[conversation.seed % len(SAMPLINGS)],
        seed=conversation.seed,
        max_tokens=OUTPUT_LEN,
        ignore_eos=True,
    )
    request = Request(str(conversation.seed), conversation.tokens, sampling)
    outputs = [output async for output in engine.generate(request)]
    return [token for output in outputs for token in output.new_token_ids], outputs[0].num_cached_tokens


def run_campaign(name: str, num_faults: int, seed: int) -> Counter[str]:
    with tempfile.TemporaryDirectory() as parent:
        model, directory = Path(parent, "model"), Path(parent, "blocks")
        model.mkdir()
        directory.mkdir(mode=0o700)
        give_to_unprivileged_user(directory)
        write_tiny_checkpoint(name, model)
        for path in model.iterdir():
            path.chmod(0o644)  # The engine's process drops its privileges before it reads the files.
        campaign = Campaign(model, directory, seed)
        asyncio.run(campaign.run(num_faults))
        return campaign.totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="number of faults for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", nargs="+", default=["Llama, tied", "Qwen3-Next", "DeepSeek-V3"], choices=TINY_MODELS
    )
    arguments = parser.parse_args()
    for name in arguments.models:
        totals = run_campaign(name, arguments.faults, arguments.seed)
        print(f"{name} | {', '.join(f'{key} {total}' for key, total in sorted(totals.items()))}", flush=True)


if __name__ == "__main__":
    main()
