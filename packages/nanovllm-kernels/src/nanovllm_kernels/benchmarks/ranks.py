"""Starts one process per rank on this host, for programs and tests of the collectives."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Timeout of torch.distributed calls in which a rank waits for other ranks.
GROUP_TIMEOUT = timedelta(seconds=120)
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def run_ranks(
    function: Callable[..., None], size: int, device_type: str, *arguments: object, timeout_s: float | None = None
) -> None:
    """Call `function(device, *arguments)` in `size` new processes, each a rank of the default process group.

    function: module-level, so that a new process can import it.
    device_type: "cpu" (gloo) or "cuda" (NCCL; rank r has GPU r).
    timeout_s: time limit of the call. None: no limit.
    Raises: ProcessRaisedException with the traceback of a rank that failed, or TimeoutError. No process is left behind.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        context = mp.spawn(_run_rank, (function, size, device_type, rendezvous, arguments), size, join=False)
        try:
            while not context.join(timeout=1):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"the {size} ranks of {function.__name__} did not end within {timeout_s} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _run_rank(
    rank: int,
    function: Callable[..., None],
    size: int,
    device_type: str,
    rendezvous: str,
    arguments: tuple[object, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )
    function(device, *arguments)
    # Not called if `function` raises: the call might wait for ranks that wait for this rank. The parent ends all ranks.
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip Python's shutdown: in Python 3.11, it ends threads that wait for the interpreter lock. If a gloo thread
    # waits, the process aborts.
    os._exit(0)
