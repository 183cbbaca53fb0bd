"""The ranks' receive buffers, as kernels see them."""

from dataclasses import dataclass

from torch import Tensor

from nanovllm_kernels.collective.policy import MAX_PROGRAMS, NUM_PHASES


@dataclass(frozen=True)
class PeerMemory:
    """The ranks' receive buffers: regions of slots, [MAX_PROGRAMS, NUM_PHASES, sender, region_bytes].

    A program of a kernel sends only to the same program of its peers. Its calls alternate between two phases. When a
    program sends again in a phase, each peer has emptied the slots: in the call between, the program has received units
    from each peer, and a peer sends only after its previous kernels have ended. `gluon_peer_memory` explains slots.

    addresses: int64 [size], the address of each rank's buffer.
    phases: int32 [MAX_PROGRAMS], the phase of each program's next call. On the device, so that graphs can replay calls.
    num_programs: the greatest grid.
    buffer: the owner of the mapped memory.
    """

    rank: int
    size: int
    addresses: Tensor
    phases: Tensor
    num_programs: int
    region_bytes: int
    buffer: object


def count_buffer_bytes(size: int, region_bytes: int) -> int:
    """Return the number of bytes of a receive buffer."""
    return MAX_PROGRAMS * NUM_PHASES * size * region_bytes
