"""The ranks' receive buffers, as kernels see them."""

from dataclasses import dataclass

from torch import Tensor

from nanovllm_kernels.collective.policy import MAX_PROGRAMS, NUM_PHASES


@dataclass(frozen=True)
class PeerMemory:
    """The ranks' receive buffers. `gluon_peer_memory` has the protocol.

    A buffer consists of regions of slots: [MAX_PROGRAMS, NUM_PHASES, sender, region_bytes]. A program sends only to the
    same program of its peers. The calls of a program alternate between two phases.
    """

    rank: int
    size: int
    addresses: Tensor  # int64 [size], each rank's buffer
    phases: (
        Tensor  # int32 [MAX_PROGRAMS], phase of each program's next call; on the device, because graphs replay calls
    )
    num_programs: int  # greatest grid
    region_bytes: int
    buffer: object  # owns the mapped memory


def count_buffer_bytes(size: int, region_bytes: int) -> int:
    """Return the number of bytes of a receive buffer."""
    return MAX_PROGRAMS * NUM_PHASES * size * region_bytes
