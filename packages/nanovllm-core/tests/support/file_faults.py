"""Random faults in a directory of KV blocks that several processes use: `python file_faults.py [--faults N --seed N]`.

Processes of two identities write and read blocks, and evict each other's files, while faults are injected. No read may
return a wrong payload, no process may fail, and the files may not exceed the limit. test_file_faults.py runs a sample.
"""

import argparse
import hashlib
import logging
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections import Counter
from ctypes import Array, c_uint64
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from directory_faults import (
    FAULTS,
    DirectoryFaults,
    choose_forever,
    drop_privileges,
    dropped_privileges,
    give_to_unprivileged_user,
)

from nanovllm_core.cache import block_files
from nanovllm_core.cache.block_files import BlockFiles
from nanovllm_core.cache.shared_directory import load_secret

NUM_PROCESSES, NUM_HASHES, PAYLOAD_BYTES = 4, 60, 1 << 18
MAX_FILE_BYTES = PAYLOAD_BYTES + 400
MAX_BYTES = 40 * MAX_FILE_BYTES
MAX_FAULT_INTERVAL_S = 0.05
# Number of reads and writes between two faults, if the processes get no processor time in the interval.
MIN_ACTIONS_PER_FAULT = 30
MAX_WAIT_S = 60.0


def make_payload(identity: bytes, block_hash: bytes) -> bytes:
    return hashlib.shake_128(identity + block_hash).digest(PAYLOAD_BYTES)


def use_files(
    directory: Path, identity: bytes, seed: int, pipe: Connection, num_actions: "Array[c_uint64]", index: int
) -> None:
    """Write and read random blocks until `pipe` has a message, then send the totals.

    num_actions: reads and writes of each process. This process has the position `index`.
    """
    drop_privileges()
    logging.disable()
    # Without this hook, an error in a background thread would only be printed.
    threading.excepthook = lambda _: os._exit(2)
    block_files._SUSPENSION_S = block_files._SCAN_RETRY_S = block_files._SCAN_INTERVAL_S = 0.02
    rng, totals = random.Random(seed), Counter()
    hashes = [hashlib.sha256(b"%d" % number).digest() for number in range(NUM_HASHES)]
    payloads = {block_hash: make_payload(identity, block_hash) for block_hash in hashes}
    buffer = memoryview(bytearray(PAYLOAD_BYTES))
    files = BlockFiles(directory, MAX_BYTES, identity, PAYLOAD_BYTES)
    pipe.send(load_secret(directory))
    while not pipe.poll():
        block_hash = rng.choice(hashes)
        action = rng.random()
        if action < 0.001:
            files.clear()
        elif action < 0.01:
            # Only a part of the file is written, as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(MAX_FILE_BYTES), resource.RLIM_INFINITY))
            files.write(block_hash, memoryview(payloads[block_hash]))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        elif action < 0.5:
            files.write(block_hash, memoryview(payloads[block_hash]))
        elif files.read(block_hash, buffer):
            totals["num_wrong"] += buffer != payloads[block_hash]
        num_actions[index] += 1
    files.close()
    totals.update(asdict(files.counts))
    pipe.send(totals)


class Campaign:
    def __init__(self, directory: Path, seed: int):
        self._directory = directory
        self._rng = random.Random(seed)
        self._faults = DirectoryFaults(directory, self._rng)
        self._names = choose_forever([*FAULTS, "kill"], self._rng)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._num_actions = self._context.RawArray(c_uint64, NUM_PROCESSES)
        self._processes = [self._start(index) for index in range(NUM_PROCESSES)]
        self.totals: Counter[str] = Counter()

    def _start(self, index: int) -> tuple[ForkServerProcess, Connection]:
        pipe, child_pipe = self._context.Pipe()
        arguments = self._directory, b"%d" % (index % 2), self._rng.getrandbits(32), child_pipe
        process = self._context.Process(target=use_files, args=(*arguments, self._num_actions, index))
        process.start()
        child_pipe.close()
        # A fault could make a start fail, so wait until the process has started.
        assert pipe.recv() == (self._directory / "secret").read_bytes()
        return process, pipe

    def inject_fault(self) -> None:
        min_actions = sum(self._num_actions) + MIN_ACTIONS_PER_FAULT
        time.sleep(self._rng.random() * MAX_FAULT_INTERVAL_S)
        end_s = time.monotonic() + MAX_WAIT_S
        while sum(self._num_actions) < min_actions:
            assert time.monotonic() < end_s, f"the processes have not read or written for {MAX_WAIT_S:g} s"
            time.sleep(0.001)
        name = next(self._names)
        if name == "kill":
            self._kill(self._rng.randrange(NUM_PROCESSES))
            self.totals[name] += 1
        else:
            self.totals[name] += self._faults.inject(name)
        self._check_size()

    def _kill(self, index: int) -> None:
        process, pipe = self._processes[index]
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"a process ended with status {process.exitcode}"
        pipe.close()
        self._processes[index] = self._start(index)

    def _check_size(self) -> None:
        # A running process renames files, which could then be counted twice.
        for process, _ in self._processes:
            assert process.is_alive(), f"a process ended with status {process.exitcode}"
            os.kill(process.pid, signal.SIGSTOP)
        max_bytes = MAX_BYTES + self._faults.num_added_bytes
        if (num_bytes := self._sum_sizes()) > max_bytes:
            time.sleep(0.5)  # A process may not have stopped yet.
            num_bytes = self._sum_sizes()
        self.totals["num_temporary_files_seen"] += len([*self._directory.glob("*/temporary-*")])
        for process, _ in self._processes:
            os.kill(process.pid, signal.SIGCONT)
        self.totals["max_bytes_seen"] = max(self.totals["max_bytes_seen"], num_bytes)
        assert num_bytes <= max_bytes, f"{num_bytes} bytes exceed the limit of {max_bytes}"

    def _sum_sizes(self) -> int:
        while True:
            try:
                return sum(path.stat().st_size for path in self._directory.glob("*/*"))
            except FileNotFoundError:  # A process has not stopped yet.
                continue

    def finish(self) -> None:
        for _, pipe in self._processes:
            pipe.send("end")
        for process, pipe in self._processes:
            self.totals.update(pipe.recv())
            process.join()
            assert process.exitcode == 0, f"a process ended with status {process.exitcode}"
        assert self.totals["num_wrong"] == 0, f"{self.totals['num_wrong']} reads gave a wrong payload"
        with dropped_privileges():
            files = BlockFiles(self._directory, MAX_BYTES, b"0", PAYLOAD_BYTES)
            assert files.indexed.wait(60)
            files.close()
        remaining = [path for path in self._directory.rglob("*") if path.name.startswith(("temporary", "writer"))]
        assert not remaining, f"files of ended processes remain: {remaining}"

    def kill_processes(self) -> None:
        for process, _ in self._processes:
            process.kill()
            process.join()


def run_campaign(num_faults: int, seed: int) -> Counter[str]:
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent, "blocks")
        directory.mkdir(mode=0o700)
        give_to_unprivileged_user(directory)
        campaign = Campaign(directory, seed)
        try:
            for _ in range(num_faults):
                campaign.inject_fault()
            campaign.finish()
        finally:
            campaign.kill_processes()
        return campaign.totals


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--faults", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    for name, total in sorted(run_campaign(arguments.faults, arguments.seed).items()):
        print(f"{name} | {total}")


if __name__ == "__main__":
    main()
