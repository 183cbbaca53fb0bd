"""Measures the tiers of the prefix cache on a GPU: copies, times to the first token, and the cost for decodes.

    python packages/nanovllm-server/tests/support/measure_tiers.py MODEL [--load-format dummy] [--host-gib 60]

Three engines run one after the other: without tiers, with host memory, and with files. Prompts are random tokens.
Conversations return with the same prompt and load all blocks but the last.
"""

import argparse
import asyncio
import dataclasses
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import nanovllm_models
from nanovllm_core import AsyncEngine, EngineConfig, EngineStats, ModelSpec, Request, SamplingParams

PROMPT_LENS = (8192, 32768)
NUM_RETURNS = 3
# This many of the longest prompts exceed the GPU's cache.
NUM_FILLERS = 5
# Conversations that return at the same time beside decodes.
NUM_RETURNING = 2
NUM_STREAMS, STREAM_PROMPT_LEN, STREAM_OUTPUT_LEN = 64, 256, 640
BURST_SIZE, BURST_PROMPT_LEN = 24, 16_384
MAX_MODEL_LEN = 36_864
TOKENS = range(10, 40_000)
MIB = 1 << 20


class Conversations:
    def __init__(self, engine: AsyncEngine):
        self.engine = engine
        self._num_requests = 0
        self._prompts: dict[str, list[int]] = {}

    async def ask(self, name: str, prompt_len: int) -> tuple[float, int]:
        """Returns the seconds to the first token, and the number of cached prompt tokens."""
        request = self._make_request(name, prompt_len, 1)
        begin = time.perf_counter()
        async for output in self.engine.generate(request):
            return time.perf_counter() - begin, output.num_cached_tokens
        raise RuntimeError("a request ended without a token")

    async def stream(self, name: str, prompt_len: int, output_len: int, times: list[float]) -> None:
        async for output in self.engine.generate(self._make_request(name, prompt_len, output_len)):
            times += [time.perf_counter()] * len(output.new_token_ids)

    async def fill(self) -> None:
        """Evicts all other conversations from the cache."""
        for index in range(NUM_FILLERS):
            await self.ask(f"filler {index}", max(PROMPT_LENS))

    async def wait_for_copies(self) -> None:
        """Returns when no block has been stored or written for a second."""
        copied, unchanged_since = None, time.perf_counter()
        while time.perf_counter() - unchanged_since < 1 or not copied or not copied[0][1]:
            await asyncio.sleep(0.05)
            if (now := self.engine.stats.copied_bytes) != copied:
                copied, unchanged_since = now, time.perf_counter()

    def _make_request(self, name: str, prompt_len: int, output_len: int) -> Request:
        self._num_requests += 1
        if name not in self._prompts:
            self._prompts[name] = random.Random(name).choices(TOKENS, k=prompt_len)
        sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        return Request(f"{name} {self._num_requests}", self._prompts[name], sampling)


def measure_pinned_copies(num_bytes: int = 1 << 30) -> None:
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    for name, target, source in (("load", device, host), ("store", host, device)):
        rates: list[float] = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(num_bytes / begin.elapsed_time(end) / 1e6)
        print(f"pinned {name}: {max(rates):.1f} GB/s")


async def measure_decodes(
    conversations: Conversations, name: str, returning: Sequence[str] = (), min_interval_s: float = 0.0
) -> float:
    """Returns the mean interval between returns of conversations, in seconds."""
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    streams = [
        asyncio.create_task(conversations.stream(f"{name} {index}", STREAM_PROMPT_LEN, STREAM_OUTPUT_LEN, times[index]))
        for index in range(NUM_STREAMS)
    ]
    while not all(times):
        await asyncio.sleep(0.01)
    before, begin, num_returns = conversations.engine.stats, time.perf_counter(), 0

    async def keep_returning() -> None:
        nonlocal num_returns
        while not any(stream.done() for stream in streams):
            await asyncio.sleep(begin + num_returns * min_interval_s - time.perf_counter())
            num_returns += 1
            await conversations.ask(returning[num_returns % len(returning)], max(PROMPT_LENS))

    await asyncio.gather(*(keep_returning() for _ in range(NUM_RETURNING if returning else 0)))
    seconds, copies = time.perf_counter() - begin, _describe_copies(conversations.engine, before)
    await asyncio.gather(*streams)
    start = max(stream_times[0] for stream_times in times)
    end = min(stream_times[-1] for stream_times in times)
    num_tokens = sum(start < token_time <= end for stream_times in times for token_time in stream_times)
    step_ms = (end - start) * NUM_STREAMS / num_tokens * 1e3
    returns = f"{num_returns} returns in {seconds:.2f} s, {copies}"
    print(f"{name}: {step_ms:.3f} ms per step of {NUM_STREAMS} decodes, {returns}")
    return seconds / max(num_returns, 1)


async def measure_returns(conversations: Conversations, name: str) -> None:
    for prompt_len in PROMPT_LENS:
        new = [await conversations.ask(f"{name} {prompt_len} {index}", prompt_len) for index in range(NUM_RETURNS)]
        print(f"{name}: new prompt of {prompt_len} tokens: {_milliseconds(new)} ms")
        if not conversations.engine.stats.copied_bytes:
            continue
        await conversations.wait_for_copies()
        await conversations.fill()
        before = conversations.engine.stats
        returned = [await conversations.ask(f"{name} {prompt_len} {index}", prompt_len) for index in range(NUM_RETURNS)]
        print(
            f"{name}: returned prompt of {prompt_len} tokens: {_milliseconds(returned)} ms, "
            f"{[cached for _, cached in returned]} cached, {_describe_copies(conversations.engine, before)}"
        )


async def measure_burst(conversations: Conversations, name: str) -> None:
    names = [f"burst {index}" for index in range(BURST_SIZE)]
    for title in ("new", "returned"):
        before = conversations.engine.stats
        begin = time.perf_counter()
        results = await asyncio.gather(*(conversations.ask(each, BURST_PROMPT_LEN) for each in names))
        seconds = time.perf_counter() - begin
        times = sorted(ttft for ttft, _ in results)
        print(
            f"{name}: {BURST_SIZE} {title} prompts of {BURST_PROMPT_LEN} tokens at once: all {seconds:.2f} s, "
            f"median {statistics.median(times):.2f} s, max {times[-1]:.2f} s, "
            f"{sum(cached for _, cached in results)} tokens cached, {_describe_copies(conversations.engine, before)}"
        )
        if conversations.engine.stats.copied_bytes:
            await conversations.wait_for_copies()


def _milliseconds(results: Sequence[tuple[float, int]]) -> str:
    return ", ".join(f"{seconds * 1e3:.1f}" for seconds, _ in results)


def _describe_copies(engine: AsyncEngine, before: EngineStats) -> str:
    after, parts = engine.stats, []
    for (kind, num_bytes), (_, seconds) in zip(after.copied_bytes, after.copy_s, strict=True):
        num_bytes -= dict(before.copied_bytes)[kind]
        seconds -= dict(before.copy_s)[kind]
        if num_bytes:
            parts.append(f"{kind} {num_bytes / 1e9:.1f} GB at {num_bytes / seconds / 1e9:.1f} GB/s")
    return ", ".join(parts) or "no copies"


async def run(spec: ModelSpec, config: EngineConfig, host_gib: float, directory: Path) -> None:
    measure_pinned_copies()
    tiers = {
        "no tiers": {},
        "host memory": {"kv_offload_gib": host_gib},
        # The host memory holds about one of the longest prompts, so returns read files.
        "files": {"kv_offload_gib": 5.0, "kv_offload_dir": directory},
    }
    for name, settings in tiers.items():
        begin = time.perf_counter()
        engine = await AsyncEngine.start(spec, dataclasses.replace(config, **settings))
        gc.collect()
        gc.freeze()
        print(f"{name}: started in {time.perf_counter() - begin:.1f} s, {engine.stats.num_blocks} blocks")
        conversations = Conversations(engine)
        try:
            begin = time.perf_counter()
            await conversations.ask("warm-up", max(PROMPT_LENS))
            await conversations.ask("warm-up 2", max(PROMPT_LENS))
            if settings:
                await conversations.wait_for_copies()
                print(f"{name}: first copies ended after {time.perf_counter() - begin:.1f} s")
                await conversations.fill()
                await conversations.wait_for_copies()
            await measure_returns(conversations, name)
            if name != "files":
                await measure_decodes(conversations, f"{name}, warm-up decodes")
                fillers = [f"filler {index}" for index in range(NUM_FILLERS)]
                for index in range(3):
                    await measure_decodes(conversations, f"{name}, decodes {index}")
                    if settings:
                        title = f"{name}, decodes beside loads {index}"
                        interval_s = await measure_decodes(conversations, title, fillers)
                        # These conversations stay in the cache and need no loads.
                        title = f"{name}, decodes beside cached prompts {index}"
                        await measure_decodes(conversations, title, fillers[:NUM_RETURNING], interval_s)
                await measure_burst(conversations, name)
            if settings:
                # Unfinished copies hold blocks.
                await conversations.wait_for_copies()
            stats = engine.stats
            print(
                f"{name}: {stats.loaded_tokens} loaded, {stats.rejected_load_tokens} rejected, "
                f"{stats.num_failed_loads} failed loads, waited {stats.load_wait_s:.2f} s, "
                f"{stats.num_blocks - stats.num_free_blocks} blocks held"
            )
        finally:
            await engine.stop()
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--cache-gib", type=float, default=16, help="size of the GPU's cache")
    parser.add_argument("--block-bytes", type=int, default=16 * MIB, help="bytes of a block of the model")
    parser.add_argument("--host-gib", type=float, default=60)
    parser.add_argument("--dir", type=Path, help="parent of the directory for files")
    flags = parser.parse_args()
    directory = nanovllm_models.find_model(flags.model, with_weights=flags.load_format != "dummy")
    spec = nanovllm_models.load(directory.path, load_format=flags.load_format, served_name=directory.name)
    config = EngineConfig(
        num_blocks=int(flags.cache_gib * 1024 * MIB) // flags.block_bytes, max_model_len=MAX_MODEL_LEN
    )
    with tempfile.TemporaryDirectory(dir=flags.dir) as files:
        asyncio.run(run(spec, config, flags.host_gib, Path(files)))


if __name__ == "__main__":
    main()
