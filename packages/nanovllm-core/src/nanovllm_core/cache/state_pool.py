"""Allocates the state slots of a model with recurrent layers, to running requests and to checkpoints.

A slot holds the state of one sequence. A checkpoint is a copy of a request's state after some tokens of its prompt.
Later requests find it by the hash of the blocks that it covers, until its slot is evicted.
"""

from collections.abc import Sequence

from nanovllm_core.cache.block_pool import NULL_BLOCK, BlockPool
from nanovllm_core.request_state import MAX_CHECKPOINTS, BlockHash, Checkpoint, RequestState
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

NULL_SLOT = NULL_BLOCK


def checkpoint_positions(num_computed: int, num_tokens: int, num_shared: int) -> list[int]:
    """Positions at which a prompt leaves checkpoints, most useful first.

    num_computed: tokens of the prompt that are cached, so that no checkpoint is left among them.
    num_tokens: length of the prompt.
    num_shared: number of leading tokens that earlier prompts had too; later prompts may diverge at the same position.

    The other positions lie near the end, where continued conversations diverge. Their distances from the end double,
    because states are large and so checkpoints are few. A request that diverges n tokens before this prompt's end finds
    a checkpoint at most n + CHECKPOINT_INTERVAL tokens before its first different token.
    """
    last = num_tokens - num_tokens % CHECKPOINT_INTERVAL
    distances = [0, *(CHECKPOINT_INTERVAL << doublings for doublings in range(MAX_CHECKPOINTS))]
    near_end = (last - distance for distance in distances)
    positions = dict.fromkeys([num_shared - num_shared % CHECKPOINT_INTERVAL, *near_end])
    return [position for position in positions if position > num_computed][:MAX_CHECKPOINTS]


class StatePool:
    """Slots 1..num_slots. Slot 0 is the null slot, which padding uses.

    max_running: maximum number of running requests. block_size: tokens per block.
    """

    def __init__(self, num_slots: int, max_running: int, block_size: int):
        self.slots = BlockPool(num_slots)
        self._block_size = block_size
        self._blocks_per_checkpoint = CHECKPOINT_INTERVAL // block_size
        # Rows of the batch without a request: each may need a slot.
        self._num_free_rows = max_running

    def find_checkpoint(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """The last checkpoint along a chain of blocks: the number of blocks it covers and its slot.

        Returns (0, NULL_SLOT) if there is no checkpoint.
        """
        interval = self._blocks_per_checkpoint
        for num_blocks in range(len(hashes) - len(hashes) % interval, 0, -interval):
            slot = self.slots.lookup(hashes[num_blocks - 1])
            if slot is not None:
                return num_blocks, slot
        return 0, NULL_SLOT

    def allocate(
        self, request: RequestState, source_slot: int, *, num_computed: int, num_shared: int, leaves_checkpoints: bool
    ) -> None:
        """Allocate a slot for a request that starts, and slots for checkpoints from those not reserved for free rows.

        source_slot: slot of the checkpoint that the request starts from, or the null slot.
        num_computed: position of that checkpoint. num_shared: see `checkpoint_positions`.
        """
        slots = self.slots
        # Holding the source slot keeps it from being evicted below, and marks it as used last.
        held_slots = [source_slot] if source_slot else []
        for slot in held_slots:
            slots.acquire(slot)
        request.source_state_slot = source_slot
        (request.state_slot,) = slots.allocate(1)
        self._num_free_rows -= 1
        positions: list[int] = []
        if leaves_checkpoints:
            positions = checkpoint_positions(num_computed, request.num_tokens, num_shared)
        # Keep one slot per free row and one more, because a free slot may be the source of the next request.
        num_spare_slots = slots.num_free + len(held_slots) - self._num_free_rows - 1
        positions = sorted(positions[: max(num_spare_slots, 0)])
        request.checkpoints = [*map(Checkpoint, positions, slots.allocate(len(positions)))]
        slots.release(held_slots)

    def commit(self, request: RequestState, num_computed: int) -> None:
        """Register the checkpoints within the first `num_computed` tokens, whose step has finished."""
        checkpoints = request.checkpoints
        while checkpoints and checkpoints[0].position <= num_computed:
            position, slot = checkpoints.pop(0)
            self.slots.register(slot, request.block_hashes[position // self._block_size - 1])
            self.slots.release([slot])

    def release(self, request: RequestState) -> None:
        """Release the slots of a request."""
        self.slots.release([request.state_slot, *(slot for _, slot in request.checkpoints)])
        request.state_slot, request.checkpoints = NULL_SLOT, []
        self._num_free_rows += 1
