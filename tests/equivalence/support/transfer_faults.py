"""Random faults while an engine fetches KV blocks from another: `python transfer_faults.py [--faults N ...]`.

A decode engine fetches the blocks of returning conversations from a prefill engine. Meanwhile, engines are killed and
suspended, messages are lost, delayed, repeated and reordered, and blocks are damaged. Each answer must equal that of a
single engine and arrive in time. No engine may keep blocks. test_transfer_faults.py runs a sample.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from directory_faults import choose_forever
from rank_matrix import write_tiny_checkpoint
from tier_faults import COMMON_SETTINGS, MAX_CONCURRENT, OUTPUT_LEN, Conversation, generate, wait_until
from tiny_models import TINY_MODELS
from transfer_pairs import CARRIERS, write_secret

from nanovllm_core import AsyncEngine, EngineClient, EngineConfig, EngineDeadError, ModelSpec
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.engine.interface import Engine
from nanovllm_core.engine.process import EngineProcess
from nanovllm_core.transfer import carriers
from nanovllm_core.transfer.fetch_times import FetchTimes
from nanovllm_core.transfer.prefix_client import PeerConnection
from nanovllm_core.transfer.prefix_server import PrefixServer
from nanovllm_models import load

NUM_CONVERSATIONS = 12
DECODE_SETTINGS = {"num_blocks": 40, "kv_offload_gib": 0.001}
PREFILL_SETTINGS = {"num_blocks": 80, "kv_offload_gib": 0.002}
MAX_FAULT_DELAY_S, MAX_FAULT_S = 0.1, 1.0
MAX_MESSAGE_DELAY_S = 3.0
SUSPENSION_FACTOR = 3.0
MAX_RECOVERY_S = 30.0
FAULT_SHARE = 0.3
MESSAGE_FAULTS = ("drop", "delay", "repeat", "reorder")
TEMPORARY_FAULTS = (*MESSAGE_FAULTS, "damage_blocks", "fail_copies")
PROCESS_FAULTS = ("kill_prefill", "kill_decode", "suspend_prefill")
FAULTS = (*TEMPORARY_FAULTS, *PROCESS_FAULTS)


@dataclass(frozen=True)
class FaultyEngineRecipe:
    """A fault can occur while `directory` has a file with the fault's name."""

    model: Path
    directory: Path
    config: EngineConfig

    def __call__(self) -> tuple[ModelSpec, EngineConfig]:
        # Otherwise the engine fetches nothing, because computing a tiny model's prompts is faster.
        CopyTimeModel.predict = lambda *_: 0.0
        FetchTimes.is_worthwhile = lambda *_: True
        for sender in (PeerConnection, PrefixServer):
            sender._send = self.make_unreliable(sender._send)
        for carrier in (carriers.SharedMemoryCarrier, carriers.TcpCarrier, carriers.NixlCarrier):
            carrier.copy = self.make_damaging(carrier.copy)
        return load(self.model), self.config

    def draw_fault(self, name: str) -> bool:
        return (self.directory / name).exists() and random.random() < FAULT_SHARE

    def make_unreliable(self, send: Callable[..., None]) -> Callable[..., None]:
        held_arguments: list[tuple] = []

        def send_or_fail(*arguments) -> None:
            event_loop = asyncio.get_running_loop()
            if self.draw_fault("drop"):
                return
            if self.draw_fault("delay"):
                event_loop.call_later(random.random() * MAX_MESSAGE_DELAY_S, self.send_late, send, arguments)
            elif self.draw_fault("reorder"):
                held_arguments.append(arguments)
            else:
                send(*arguments)
                while held_arguments:
                    send(*held_arguments.pop())
            if self.draw_fault("repeat"):
                event_loop.call_later(random.random() * MAX_MESSAGE_DELAY_S, self.send_late, send, arguments)

        return send_or_fail

    @staticmethod
    def send_late(send: Callable[..., None], arguments: tuple) -> None:
        if not arguments[0]._socket.closed:
            send(*arguments)

    def make_damaging(self, copy: Callable[..., None]) -> Callable[..., None]:
        def copy_or_damage(carrier, copies) -> None:
            copy(carrier, copies)
            for kind, _, slot, _ in copies:
                if self.draw_fault("damage_blocks"):
                    carrier._memory.slot(kind, slot)[random.randrange(100)] ^= 1
            if self.draw_fault("fail_copies"):
                raise carriers.TransferError("an injected failure")

        return copy_or_damage


class FaultyProcess:
    def __init__(self, recipe: FaultyEngineRecipe):
        self._recipe = recipe
        self.engine: EngineClient | None = None
        self.is_serving = asyncio.Event()

    async def start(self) -> None:
        self._process = EngineProcess(self._recipe)
        self.engine = await EngineClient.adopt(self._process)
        self.is_serving.set()

    async def kill_and_restart(self) -> None:
        self.is_serving.clear()
        self._process.kill()
        await self.engine.stop()
        await self.start()

    async def suspend(self, seconds: float) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(self._process.pid, signal.SIGCONT)

    async def check_idle(self) -> None:
        def is_idle() -> bool:
            stats, num_slots = self.engine.stats, self.engine.info.num_state_slots
            is_all_free = (stats.num_free_blocks, stats.num_free_state_slots) == (stats.num_blocks, num_slots)
            return is_all_free and stats.num_held_host_slots == stats.num_leases == 0

        await wait_until(is_idle, lambda: f"the idle engine holds blocks, slots or leases: {self.engine.stats}")


class Campaign:
    """max_answer_s: maximum time of an answer, unless the decode engine is killed meanwhile."""

    def __init__(self, model: Path, directory: Path, carrier: str, seed: int, max_answer_s: float):
        self._model = model
        self._directory = directory
        self._max_answer_s = max_answer_s
        self._rng = random.Random(seed)
        self._fault_names = choose_forever(FAULTS, self._rng)
        self._conversations = [Conversation(self._rng.getrandbits(31)) for _ in range(NUM_CONVERSATIONS)]
        common = {**COMMON_SETTINGS, "transfer_carrier": carrier}
        common["transfer_secret_file"] = write_secret(directory / "secret")
        address = f"ipc://{directory}/transfer"
        prefill = EngineConfig(**common, **PREFILL_SETTINGS, transfer_listen=address)
        decode = EngineConfig(**common, **DECODE_SETTINGS, transfer_peers=(address,), prefill_peer=address)
        self._prefill = FaultyProcess(FaultyEngineRecipe(model, directory, prefill))
        self._decode = FaultyProcess(FaultyEngineRecipe(model, directory, decode))
        self.totals: Counter[str] = Counter()
        self.slowest_answer_s = 0.0

    async def run(self, num_faults: int) -> None:
        expected_engine = await AsyncEngine.start(load(self._model), EngineConfig(**COMMON_SETTINGS, num_blocks=200))
        fault: asyncio.Task[None] | None = None
        try:
            await asyncio.gather(self._prefill.start(), self._decode.start())
            while sum(self.totals[name] for name in FAULTS) < num_faults:
                fault = asyncio.create_task(self._inject_fault())
                while not fault.done():
                    await self._run_turns(expected_engine)
                await fault
                await self._decode.check_idle()
                await self._prefill.check_idle()
            num_fetched = self._decode.engine.stats.fetched_tokens
            deadline_s = time.monotonic() + MAX_RECOVERY_S
            while self._decode.engine.stats.fetched_tokens == num_fetched:
                assert time.monotonic() < deadline_s, f"nothing is fetched: {self._decode.engine.stats.fetches}"
                await self._run_turns(expected_engine)
            self._count_fetches()
        finally:
            if fault is not None and not fault.done():
                fault.cancel()
                await asyncio.wait((fault,))
            await expected_engine.stop()
            for process in (self._decode, self._prefill):
                if process.engine is not None:
                    await process.engine.stop()

    def _count_fetches(self) -> None:
        stats = self._decode.engine.stats
        self.totals["fetched_tokens"] += stats.fetched_tokens
        self.totals.update({f"fetches: {outcome}": count for outcome, count in stats.fetches if count})

    async def _run_turns(self, expected_engine: Engine) -> None:
        conversations = self._rng.sample(self._conversations, self._rng.randrange(1, MAX_CONCURRENT + 1))
        for conversation in conversations:
            conversation.add_turn(self._rng)
        expected = await asyncio.gather(*(generate(expected_engine, conversation) for conversation in conversations))
        found = await asyncio.gather(*map(self._generate, conversations))
        for conversation, (tokens, _), found_tokens in zip(conversations, expected, found, strict=True):
            assert found_tokens == tokens, f"the answer is {found_tokens} instead of {tokens}"
            conversation.tokens += tokens
            self.totals["num_turns"] += 1
            self.totals["num_prompt_tokens"] += len(conversation.tokens) - OUTPUT_LEN

    async def _generate(self, conversation: Conversation) -> list[int]:
        """Repeats the request if the engine's process was killed."""
        process = self._decode
        while True:
            await process.is_serving.wait()
            engine, begin_s = process.engine, time.monotonic()
            try:
                tokens, _ = await generate(engine, conversation)
            except EngineDeadError:
                if engine is process.engine and process.is_serving.is_set():
                    raise
                continue
            answer_s = time.monotonic() - begin_s
            self.slowest_answer_s = max(self.slowest_answer_s, answer_s)
            assert answer_s < self._max_answer_s, f"an answer took {answer_s:.1f} s"
            return tokens

    async def _inject_fault(self) -> None:
        name = next(self._fault_names)
        seconds = self._rng.random() * MAX_FAULT_S
        await asyncio.sleep(self._rng.random() * MAX_FAULT_DELAY_S)
        match name:
            case "kill_prefill":
                await self._prefill.kill_and_restart()
            case "kill_decode":
                self._count_fetches()
                await self._decode.kill_and_restart()
            case "suspend_prefill":
                await self._prefill.suspend(SUSPENSION_FACTOR * seconds)
            case _:
                path = self._directory / name
                path.touch()
                await asyncio.sleep(seconds)
                path.unlink()
        self.totals[name] += 1


def run_campaign(name: str, carrier: str, num_faults: int, seed: int, max_answer_s: float) -> Campaign:
    with tempfile.TemporaryDirectory() as parent:
        model, directory = Path(parent, "model"), Path(parent, "transfer")
        model.mkdir()
        directory.mkdir()
        write_tiny_checkpoint(name, model)
        campaign = Campaign(model, directory, carrier, seed, max_answer_s)
        asyncio.run(campaign.run(num_faults))
        return campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=120, help="number of faults for each model and carrier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-answer-s", type=float, default=5.0, help="maximum time of an answer")
    parser.add_argument("--carriers", nargs="+", default=CARRIERS, choices=CARRIERS)
    parser.add_argument(
        "--models", nargs="+", default=["Llama, tied", "Qwen3-Next", "DeepSeek-V3"], choices=TINY_MODELS
    )
    arguments = parser.parse_args()
    for name in arguments.models:
        for carrier in arguments.carriers:
            campaign = run_campaign(name, carrier, arguments.faults, arguments.seed, arguments.max_answer_s)
            totals = ", ".join(f"{key} {total}" for key, total in sorted(campaign.totals.items()))
            print(f"{name} | {carrier} | slowest answer {campaign.slowest_answer_s:.2f} s | {totals}", flush=True)


if __name__ == "__main__":
    main()
