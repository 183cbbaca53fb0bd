"""GPU memory that every rank of a host can read and write, without NVLink multicast.

Only this module uses torch's private API for symmetric memory. The API is alpha in torch 2.11.
"""

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric_memory
from torch._C._distributed_c10d import PrefixStore, Store, _register_process_group, _unregister_process_group  # pyright: ignore[reportPrivateUsage]
from torch.distributed.distributed_c10d import GroupName, _get_process_group_store  # pyright: ignore[reportPrivateUsage]

_rendezvous_name_numbers = itertools.count()


class SymmetricBuffer:
    """One buffer per rank of a process group. The kernels of every rank can read and write all these buffers.

    memory: uint8 [num_bytes], this rank's buffer.
    addresses: the address of each rank's buffer in this process. Valid as long as this object exists.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        """Allocate and map the buffers. All ranks of `group` call this with equal `num_bytes`.

        Raises: RuntimeError if the GPUs can't access each other's memory.
        """
        self.memory = torch_symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        store = RenumberingStore(_get_process_group_store(group), group.rank())
        # The name is new, because torch would reuse the store of an earlier group of the same name.
        name = GroupName(f"nanovllm-{next(_rendezvous_name_numbers)}")
        # This variable keeps the group alive, because torch does not keep a reference.
        exchange_group = dist.ProcessGroup(store, group.rank(), group.size())
        _register_process_group(name, exchange_group)
        try:
            self._mapping = torch_symmetric_memory.rendezvous(self.memory, name)
        except RuntimeError as error:
            raise RuntimeError(
                f"{device} can't map the memory of the other GPUs; pass use_peer_memory=False to use only NCCL: {error}"
            ) from error
        finally:
            _unregister_process_group(name)
        # `buffer_ptrs` are addresses of allocations. Each buffer begins at `offset` in its allocation.
        self.addresses = [pointer + self._mapping.offset for pointer in self._mapping.buffer_ptrs]


class RenumberingStore(Store):
    """A view of a store that renumbers the exchanges of one rendezvous to 0, 1, ...

    torch counts the exchanges of a process over all groups, and puts the count into the keys. Without
    renumbering, a process that was in an earlier group and a new process would use different keys, and wait forever.
    """

    def __init__(self, store: Store, rank: int) -> None:
        """Begin a rendezvous. All ranks of a group begin its rendezvous in the same order."""
        super().__init__()
        # Each rendezvous has its own prefix, because the store keeps the keys of the group's earlier rendezvous.
        rendezvous_number = store.add(f"nanovllm-symmetric-memory-rank-{rank}", 1)
        self._store = PrefixStore(f"nanovllm-symmetric-memory-{rendezvous_number}", store)
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        """Set the value of a key PREFIX/NUMBER/RANK."""
        self._store.set(self._renumber(key), value)

    def get(self, key: str) -> bytes:
        """Return the value of a key. Waits for the key like `wait`."""
        return self._store.get(self._renumber(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Other threads can run meanwhile. timeout: None means the group store's timeout.

        Raises: RuntimeError after the timeout.
        """
        keys = [self._renumber(key) for key in keys]
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def _renumber(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        return f"{prefix}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"
