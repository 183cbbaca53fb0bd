"""Runs the Gluon kernels of the collectives on a CPU, in Triton's interpreter, with one process per rank.

The interpreter does not support Gluon, so the kernels call Triton's functions here. `put` and `take` run in numpy.
"""

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from collective_checks import check_copies, check_different_offsets, check_nan_is_no_empty_slot, check_norm, check_sums
from interpreter_fixes import change_interpreter
from triton.runtime import interpreter

from nanovllm_kernels import collective
from nanovllm_kernels.collective import (
    Communicator,
    gluon_all_reduce_norm,
    gluon_exchange,
    gluon_peer_memory,
    gluon_two_shot,
)
from nanovllm_kernels.collective.peer_collectives import PeerCollectives
from nanovllm_kernels.collective.peer_memory import PeerMemory, count_buffer_bytes
from nanovllm_kernels.collective.policy import EMPTY_BYTE, MAX_PROGRAMS, LaunchPolicy

KERNELS = (
    (gluon_peer_memory, ("find_region", "take_sum")),
    (gluon_exchange, ("find_chunk", "find_region", "take_sum", "_exchange")),
    (gluon_two_shot, ("find_chunk", "find_region", "take_sum", "_all_reduce")),
    (gluon_all_reduce_norm, ("find_region", "take_sum", "_load_row", "_all_reduce_norm")),
)
EMPTY_WORD, OTHER_NAN = np.uint32(0xFFFFFFFF), np.uint32(0x7FFF7FFF)
TIMEOUT_S = 60


class TritonForGluon:
    """Offers Triton's functions with the names and arguments of Gluon's functions."""

    def __getattr__(self, name: str) -> object:
        return getattr(tl, name)

    def arange(self, start: int, end: int, layout: None) -> tl.tensor:
        return tl.arange(start, end)

    def BlockedLayout(self, *_sizes: list[int]) -> None:
        return None

    def SliceLayout(self, _dim: int, _parent: None) -> None:
        return None

    def thread_barrier(self) -> None:
        """Do nothing: the interpreter has one thread."""


def put(units: tl.tensor, region: tl.tensor, slots: tl.tensor) -> None:
    """Like `gluon_peer_memory.put`. Units are sent at random times, in random order and word by word."""
    words = np.ascontiguousarray(units.handle.data).view(np.uint32)
    if words.shape[1] == 2:
        words = np.stack((words, np.zeros_like(words)), -1).reshape(-1, 4)
    else:
        words = np.where(words == EMPTY_WORD, OTHER_NAN, words)
    time.sleep(random.choice((0, 0, 0.003)))
    indices = slots.handle.data[:, 0]
    targets, sent_units = _map_slots(region, indices), np.flatnonzero(indices >= 0)
    assert (targets[indices[sent_units]] == EMPTY_WORD).all(), "a slot is not empty"
    for part in np.array_split(np.random.permutation(sent_units), 4):
        # `take` checks only words 1 and 3 of a unit with two elements, so send these words last.
        for word in (0, 2, 1, 3) if units.handle.data.shape[1] == 2 else random.sample(range(4), 4):
            targets[indices[part], word] = words[part, word]


def take(like: tl.tensor, region: tl.tensor, slots: tl.tensor) -> tl.tensor:
    """Like `gluon_peer_memory.take`. Each element of a unit with two elements is the lower half of a 64-bit word."""
    indices, has_wide_words = slots.handle.data[:, 0], like.handle.data.shape[1] == 2
    sources, taken_units = _map_slots(region, indices), np.flatnonzero(indices >= 0)
    deadline = time.monotonic() + TIMEOUT_S
    checked_words = slice(1, None, 2) if has_wide_words else slice(None)
    while (sources[indices[taken_units], checked_words] == EMPTY_WORD).any():
        assert time.monotonic() < deadline, "a slot stays empty"
        time.sleep(0)
    words = np.zeros((len(indices), 4), np.uint32)
    words[taken_units] = sources[indices[taken_units]]
    sources[indices[taken_units]] = EMPTY_WORD
    elements = np.ascontiguousarray(words[:, ::2] if has_wide_words else words).view(like.handle.data.dtype)
    return tl.tensor(type(like.handle)(elements, like.handle.dtype), like.type)


def _map_slots(region: tl.tensor, indices: np.ndarray) -> np.ndarray:
    """Return the words of all slots up to the largest index: [slots, 4]."""
    num_words = 4 * (int(indices.max()) + 1)
    return np.frombuffer((ctypes.c_uint32 * num_words).from_address(int(region.handle.data.item())), np.uint32).reshape(
        -1, 4
    )


def interpret_kernels() -> None:
    change_interpreter()
    gluon_language = TritonForGluon()
    interpreted: dict[str, object] = {"put": put, "take": take, "gl": gluon_language, "tl": tl}
    for module, names in KERNELS:
        for name in names:
            if name not in interpreted:
                interpreted[name] = triton.jit(vars(module)[name].fn)
        for name, value in interpreted.items():
            setattr(module, name, value)
    for kernel in interpreted.values():
        if isinstance(kernel, interpreter.InterpretedFunction):
            # The kernels annotate with `gl.constexpr`, but the interpreter recognizes only `tl.constexpr`.
            annotations = kernel.rewrite().__annotations__
            annotations |= dict.fromkeys(annotations, tl.constexpr)


def open_interpreted_collectives(directory: Path, policy: LaunchPolicy) -> PeerCollectives:
    group = dist.group.WORLD
    size, rank = group.size(), group.rank()
    num_bytes = count_buffer_bytes(size, policy.region_bytes)
    files = [directory / str(owner) for owner in range(size)]
    files[rank].write_bytes(bytes([EMPTY_BYTE]) * num_bytes)
    dist.barrier(group)
    buffers = [torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8) for file in files]
    peers = PeerMemory(
        rank=rank,
        size=size,
        addresses=torch.tensor([buffer.data_ptr() for buffer in buffers]),
        phases=torch.zeros(MAX_PROGRAMS, dtype=torch.int32),
        max_programs=policy.max_programs,
        region_bytes=policy.region_bytes,
        buffer=buffers,
    )
    return PeerCollectives(group, peers, policy)


@contextmanager
def open_interpreted_communicator(directory: Path, policy: LaunchPolicy) -> Iterator[Communicator]:
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"))
    collective._open_collectives[dist.group.WORLD.group_name] = open_interpreted_collectives(directory, policy)
    yield communicator
    communicator.close()


def check_interpreted(device: torch.device, directory: Path, dtypes: tuple[torch.dtype, ...]) -> None:
    torch.set_grad_enabled(False)
    interpret_kernels()
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    # Use two programs and small limits, so that every kernel loops over chunks.
    limits = {"one_shot_max_sent_bytes": 20 << 10, "two_shot_max_bytes": 40 << 10}
    policy = LaunchPolicy(dist.get_world_size(), 2, 32 << 10, **limits)
    with open_interpreted_communicator(directory, policy) as communicator:
        for dtype in dtypes:
            for shape in ((1, 2), (3, 333), (2, 2500), (5, 2000), (4, 6000)):
                check_sums(communicator, shape, dtype, device)
            for num_rows, hidden_size in ((1, 64), (2, 576), (7, 770), (4, 1025), (12, 512)):
                residual_dtype = (None, torch.float32, dtype)[num_rows % 3]
                check_norm(communicator, num_rows, hidden_size, (dtype, residual_dtype, torch.bfloat16), device)
        for dtype in (*dtypes, torch.int32, torch.uint8, torch.float8_e4m3fn):
            for shape in ((1, 3), (3, 100), (2, 1300), (3, 4000)):
                check_copies(communicator, shape, dtype, device)
        check_sums(communicator, (3, 33), torch.int64, device)
        check_different_offsets(communicator, device)
        check_nan_is_no_empty_slot(communicator, device)
    # Two programs have slots for four rows, so nine rows need three launches.
    policy = LaunchPolicy(dist.get_world_size(), 2, 32 << 10, one_shot_max_sent_bytes=1 << 20)
    with open_interpreted_communicator(directory, policy) as communicator:
        check_norm(communicator, 9, 6000, (torch.bfloat16, torch.bfloat16, torch.bfloat16), device)
