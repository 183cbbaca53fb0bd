"""Connects the processes of an engine's ranks."""

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from nanovllm_core.config import ResolvedConfig
from nanovllm_core.errors import ConfigError
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.collective import Communicator

# A rank may wait this long for ranks that still load weights or compile. Rank 0 detects ranks that have ended.
COLLECTIVE_TIMEOUT = timedelta(hours=2)

LEAVING_THREAD_NAME = "nanovllm-engine-leaving"
LEAVE_TIMEOUT_S = 5.0


class RankGroup:
    """This process's connection to the other ranks of an engine.

    Create and leave the group on the thread that runs the model. A process can be in one group at a time, because
    torch.distributed has one default group per process.
    """

    def __init__(self, rank: int, config: ResolvedConfig, rendezvous: Path):
        """Connect to the other ranks, and wait until all have connected.

        rendezvous: path of a file, the same on all ranks. Only the ranks' processes may have access to this file.
        Raises ConfigError if the process is already in a group of torch.distributed.
        """
        if distributed.is_initialized():
            raise ConfigError(
                "tensor_parallel_size is above 1, but this process already has a default group of torch.distributed: "
                "start the engine in a process of its own (EngineClient.launch)"
            )
        size = config.tensor_parallel_size
        self._is_cuda = config.device == "cuda"
        self._num_threads_before = torch.get_num_threads()
        device = torch.device(config.device)
        if self._is_cuda:
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, self._num_threads_before // size))
        _use_loopback()
        distributed.init_process_group(
            "nccl" if self._is_cuda else "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if self._is_cuda else None,
        )
        group = distributed.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed has no default group after init_process_group")
        if not self._is_cuda:
            # A rank may connect before the others do. If this rank then failed and ended, the others would wait for it.
            distributed.barrier(group)
        self._communicator = Communicator(group, device)
        self.context = ParallelContext(rank, size, self._communicator, config.expert_parallel, config.dp_attention)

    def leave(self) -> None:
        """Disconnect. All ranks call this method after the last step, when no CUDA graph exists any more."""
        self._communicator.close()
        if self._is_cuda:
            # NCCL sometimes waits forever for a rank that has left. The group then exists until the process ends.
            thread = threading.Thread(target=distributed.destroy_process_group, name=LEAVING_THREAD_NAME, daemon=True)
            thread.start()
            thread.join(LEAVE_TIMEOUT_S)
        else:
            distributed.destroy_process_group()
            torch.set_num_threads(self._num_threads_before)

    def abandon(self) -> None:
        """Call this method instead of `leave` after another rank has ended."""
        # With NCCL, leaving could wait for the ended rank forever: keep the group until this process ends.
        if not self._is_cuda:
            self.leave()


def _use_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface only, unless the user has chosen an interface."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo0" if sys.platform == "darwin" else "lo")
