"""Allocates the state slots of a model with recurrent layers to running requests and to checkpoints.

A slot holds the state of one sequence. A checkpoint is a copy of a request's state after some tokens of its prompt.
Later requests find a checkpoint by the hash of the last block before the checkpoint, until the slot is evicted.
"""

from collections.abc import Sequence

from nanovllm_core.cache.block_pool import NULL_BLOCK, BlockPool
from nanovllm_core.request_state import MAX_CHECKPOINTS, BlockHash, Checkpoint, RequestState
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

NULL_SLOT = NULL_BLOCK


def checkpoint_positions(num_computed: int, num_tokens: int, num_shared: int) -> list[int]:
    """Positions at which a prompt saves checkpoints, most useful first.

    num_computed: number of cached tokens of the prompt. No checkpoint is saved within these tokens.
    num_shared: number of leading tokens that an earlier prompt had too. Later prompts may diverge at this position.

    The first position is the end of the shared tokens. The other positions are near the end of the prompt, where
    continued conversations diverge. Distances from the end double, so that few checkpoints cover a long prompt.
    """
    last = num_tokens - num_tokens % CHECKPOINT_INTERVAL
    distances = [0, *(CHECKPOINT_INTERVAL << doublings for doublings in range(MAX_CHECKPOINTS))]
    positions_near_end = (last - distance for distance in distances)
    positions = dict.fromkeys([num_shared - num_shared % CHECKPOINT_INTERVAL, *positions_near_end])
    return [position for position in positions if position > num_computed][:MAX_CHECKPOINTS]


class StatePool:
    """Slots 1..num_state_slots. Padding uses slot 0, the null slot. max_running: maximum number of running requests."""

    def __init__(self, num_state_slots: int, max_running: int, block_size: int):
        self.slots = BlockPool(num_state_slots)
        self._block_size = block_size
        self._blocks_per_checkpoint = CHECKPOINT_INTERVAL // block_size
        # Keep one slot free for each request that may still start.
        self.slots.num_reserved = max_running
        # Slots of the checkpoints from which admitted requests will start, by request key.
        self._held_sources: dict[int, int] = {}

    def find_checkpoint(self, block_hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """The last checkpoint of a sequence: (number of blocks up to the checkpoint, slot), or (0, NULL_SLOT)."""
        interval = self._blocks_per_checkpoint
        for num_blocks in range(len(block_hashes) - len(block_hashes) % interval, 0, -interval):
            slot = self.slots.lookup(block_hashes[num_blocks - 1])
            if slot is not None:
                return num_blocks, slot
        return 0, NULL_SLOT

    def allocate(
        self, request: RequestState, source_slot: int, *, num_computed: int, num_shared: int, saves_checkpoints: bool
    ) -> None:
        """Allocate slots for a request that starts and for the checkpoints that the request saves.

        source_slot: slot of the checkpoint from which the request starts; the null slot for a start from zeros.
        num_computed: position of the source checkpoint. num_shared: see `checkpoint_positions`.
        """
        slots = self.slots
        # Hold the source slot, so that the allocations below do not evict it.
        num_free_before = slots.num_free
        held_slots = [source_slot] if source_slot else []
        for slot in held_slots:
            slots.acquire(slot)
        request.source_state_slot = source_slot
        (request.state_slot,) = slots.allocate(1)
        slots.num_reserved -= 1
        # Leave one slot for each request that may start, and one slot for the source checkpoint of the next request.
        # This checkpoint may be this request's source, so `num_free_before` counts this request's source slot as free.
        num_spare_slots = num_free_before - 1 - slots.num_reserved - 1
        max_checkpoints = max(num_spare_slots, 0) if saves_checkpoints else 0
        positions = sorted(checkpoint_positions(num_computed, request.num_tokens, num_shared)[:max_checkpoints])
        request.checkpoints = [*map(Checkpoint, positions, slots.allocate(len(positions)))]
        slots.release(held_slots)

    def hold_source(self, request: RequestState) -> bool:
        """Hold the source checkpoint of a request that starts later. Returns False if too few slots are free."""
        if not request.source_state_slot:
            return True
        # Leave as many slots free as `allocate`.
        if self.slots.num_free - 1 <= self.slots.num_reserved:
            return False
        self.slots.acquire(request.source_state_slot)
        self._held_sources[request.key] = request.source_state_slot
        return True

    def end_hold(self, request: RequestState) -> None:
        """End the effect of `hold_source`, if `request` has a held checkpoint."""
        if (slot := self._held_sources.pop(request.key, None)) is not None:
            self.slots.release([slot])

    def commit(self, request: RequestState, num_computed: int) -> list[BlockHash]:
        """Register the checkpoints within the first `num_computed` tokens, and return their hashes.

        The step that saved these checkpoints must have finished.
        """
        checkpoints, hashes = request.checkpoints, list[BlockHash]()
        while checkpoints and checkpoints[0].position <= num_computed:
            position, slot = checkpoints.pop(0)
            hashes.append(request.block_hashes[position // self._block_size - 1])
            self.slots.register(slot, hashes[-1])
            self.slots.release([slot])
        return hashes

    def release(self, request: RequestState) -> None:
        """Release all slots of a request."""
        self.end_hold(request)
        self.slots.release([request.state_slot, *(slot for _, slot in request.checkpoints)])
        request.state_slot, request.checkpoints = NULL_SLOT, []
        self.slots.num_reserved += 1
