"""Measures a turn in a worker that is new to the conversation, with and without the exchange of encodings.

Run: python packages/nanovllm-server/tests/support/measure_encodings.py [--runs 10]

Worker A encodes a conversation of about 32,000 tokens. Worker B then encodes the conversation with one more message.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection

from nanovllm_core.malloc_heaps import limit_malloc_heaps
from nanovllm_models import Tokenizer, default_model_path, load_tokenizer
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.processes.encoding_exchange import RingEncodingExchange, allocate_rings
from nanovllm_server.processes.rings import RingMemory
from nanovllm_server.processes.worker_main import MAX_HEAP_BLOCK_BYTES, NUM_ENCODING_THREADS
from nanovllm_server.protocol.messages import Message

NUM_MESSAGES = 80
WORDS_PER_MESSAGE = 300
WORDS = ["the", "model", "answers", "every", "question", "about", "scheduling,", "memory", "of", "2,048", "tokens"]
TICK_S = 0.0002


class TimedExchange(RingEncodingExchange):
    def __init__(self, memory: RingMemory, worker: int, num_token_ids: int):
        super().__init__(memory, worker, num_token_ids)
        self.times: dict[str, list[float]] = {"publish": [], "receive": []}

    def publish(self, encoded):
        begin = time.perf_counter()
        super().publish(encoded)
        self.times["publish"].append(time.perf_counter() - begin)

    def receive(self):
        begin = time.perf_counter()
        received = super().receive()
        self.times["receive"].append(time.perf_counter() - begin)
        return received


def make_conversation(run: int) -> list[Message]:
    rng = random.Random(run)
    texts = [f"{index} " + " ".join(rng.choices(WORDS, k=WORDS_PER_MESSAGE)) for index in range(NUM_MESSAGES)]
    return [
        Message(role="user" if index % 2 == 0 else "assistant", content=content) for index, content in enumerate(texts)
    ]


async def measure_max_wake_delay_s(stop: asyncio.Event) -> float:
    max_delay_s = 0.0
    while not stop.is_set():
        begin = time.perf_counter()
        await asyncio.sleep(TICK_S)
        max_delay_s = max(max_delay_s, time.perf_counter() - begin - TICK_S)
    return max_delay_s


async def serve_render_requests(tokenizer: Tokenizer, connection: Connection) -> None:
    renderer = Renderer(tokenizer)
    loop = asyncio.get_running_loop()
    while (messages := await loop.run_in_executor(None, connection.recv)) is not None:
        stop = asyncio.Event()
        wake_delay_task = asyncio.create_task(measure_max_wake_delay_s(stop))
        await asyncio.sleep(0.02)
        begin = time.perf_counter()
        prompt = await renderer.render(messages)
        seconds = time.perf_counter() - begin
        stop.set()
        connection.send((seconds, await wake_delay_task, prompt.token_ids))
    renderer.close()


def run_worker(memory: RingMemory | None, index: int, connection: Connection) -> None:
    limit_malloc_heaps(NUM_ENCODING_THREADS, MAX_HEAP_BLOCK_BYTES)
    os.environ.setdefault("RAYON_NUM_THREADS", str(NUM_ENCODING_THREADS))
    import uvloop

    tokenizer = load_tokenizer(default_model_path())
    exchange = None
    if memory is not None:
        exchange = TimedExchange(memory, index, tokenizer.vocab_size)
        tokenizer.share_encodings(exchange)
    connection.send("ready")
    uvloop.run(serve_render_requests(tokenizer, connection))
    connection.send(None if exchange is None else exchange.times)


def measure_turns(runs: int, *, shared: bool) -> None:
    context = multiprocessing.get_context("spawn")
    memory = allocate_rings(2) if shared else None
    pipes, processes = [], []
    for index in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run_worker, args=(memory, index, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()

    def request_prompt(worker: int, messages: list[Message]) -> tuple[float, float, object]:
        pipes[worker].send(messages)
        return pipes[worker].recv()

    rows = []
    for run in range(runs + 2):
        messages = make_conversation(run)
        first = request_prompt(0, messages)
        turn = [*messages, Message(role="user", content=f"What about {run}? " * 40)]
        rows.append((first, request_prompt(1, turn), request_prompt(1, turn)))
        assert rows[-1][1][2].tolist() == rows[-1][2][2].tolist()
    # Leave out the first two runs, which also start threads.
    rows = rows[2:]
    print(f"{'with' if shared else 'without'} exchange, {len(rows[0][0][2])} tokens; median (max) of {runs}, ms")
    for place, name in enumerate(("worker A, new", "worker B, next turn", "worker B, again")):
        for part, what in enumerate(("render and encode", "event loop late by")):
            values = [1e3 * row[place][part] for row in rows]
            print(f"  {name:20} {what:18} {statistics.median(values):7.2f} ({max(values):.2f})")
    for pipe in pipes:
        pipe.send(None)
    for name, pipe in zip("AB", pipes, strict=True):
        for what, seconds in (pipe.recv() or {}).items():
            values = [1e3 * value for value in seconds if value > 20e-6] or [0.0]
            median = statistics.median(values)
            print(f"  worker {name}, {what}: {len(values)} calls, median {median:.3f}, max {max(values):.3f}")
    for process in processes:
        process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    arguments = parser.parse_args()
    for shared in (False, True):
        measure_turns(arguments.runs, shared=shared)
