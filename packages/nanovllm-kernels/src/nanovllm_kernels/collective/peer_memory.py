"""The ranks' receive buffers, as kernels see them."""

from dataclasses import dataclass

from torch import Tensor

from nanovllm_kernels.collective.policy import MAX_PROGRAMS, NUM_PHASES


@dataclass(frozen=True)
class PeerMemory:
    """The ranks' receive buffers: regions of slots, [MAX_PROGRAMS, NUM_PHASES, sender, region_bytes].

    A slot receives one unit of SLOT_BYTES bytes (see `gluon_peer_memory`). Program p of a kernel sends only to program
    p of each peer. A slot must be empty before a program sends to the slot again. The calls of a program therefore
    alternate between two phases: calls k and k + 2 use the same slots. A kernel starts only after the kernel before it
    has ended, and in each call a program receives at least one unit from every peer. A unit of a peer's call k + 1 thus
    shows that the peer has emptied the slots of its call k. The program has this unit before its own call k + 2.

    size: number of ranks.
    addresses: int64 [size], the address of each rank's buffer.
    phases: int32 [MAX_PROGRAMS], the phase of each program's next call. On the device, so that graphs can replay calls.
    max_programs: maximum number of programs of a kernel.
    region_bytes: total bytes of the slots that a program has per phase and sender.
    buffer: the owner of the mapped memory.
    """

    rank: int
    size: int
    addresses: Tensor
    phases: Tensor
    max_programs: int
    region_bytes: int
    buffer: object


def count_buffer_bytes(size: int, region_bytes: int) -> int:
    """Return the number of bytes of one rank's receive buffer. size: number of ranks."""
    return MAX_PROGRAMS * NUM_PHASES * size * region_bytes
