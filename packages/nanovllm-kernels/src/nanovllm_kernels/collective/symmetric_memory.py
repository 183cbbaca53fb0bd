"""GPU memory that every rank of a host can read and write, without NVLink multicast.

Only this module uses torch's private API for such memory, which is alpha in torch 2.11.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric_memory


class SymmetricBuffer:
    """One buffer per rank of a process group. The kernels of every rank can read and write all these buffers.

    memory: uint8 [num_bytes], this rank's buffer.
    addresses: for each rank, the address at which this process sees the buffer of that rank. Valid as long as this
        object exists.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        """Allocate and map the buffers. All ranks of `group` call this with equal `num_bytes`.

        Raises: RuntimeError if the GPUs can't access each other's memory.
        """
        self.memory = torch_symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        try:
            self._mapping = torch_symmetric_memory.rendezvous(self.memory, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"{device} can't map the memory of the other GPUs; pass use_peer_memory=False to use only NCCL"
            ) from error
        # `buffer_ptrs` are the beginnings of the allocations that hold the buffers.
        self.addresses = [pointer + self._mapping.offset for pointer in self._mapping.buffer_ptrs]
