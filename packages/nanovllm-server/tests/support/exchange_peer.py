"""Functions that tests run in other processes, which import them by name."""

import itertools

from nanovllm_server.processes.encoding_exchange import RingEncodingExchange
from nanovllm_server.processes.rings import RingMemory


def make_payload(number: int) -> bytes:
    return number.to_bytes(8, "little") * (1 + number * 37 % 500)


def write_until_killed(memory: RingMemory, index: int) -> None:
    ring = memory.rings()[index]
    for number in itertools.count():
        ring.write(make_payload(number))


def publish(memory: RingMemory, worker: int, encoded: dict[str, bytes]) -> None:
    RingEncodingExchange(memory, worker, 1000).publish(encoded)
