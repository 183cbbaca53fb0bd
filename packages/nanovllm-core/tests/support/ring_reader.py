"""Reads messages from a plan ring, in a child process."""

import hashlib
import time
from multiprocessing.connection import Connection

from nanovllm_core.parallel.plan_ring import PlanRing


def read_messages(ring: PlanRing, index: int, count: int, delay_s: float, results: Connection) -> None:
    reader = ring.open_reader(index, spins=False)
    digests = []
    for _ in range(count):
        digests.append(digest(reader.read()))
        time.sleep(delay_s)
    results.send(digests)


def digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()
