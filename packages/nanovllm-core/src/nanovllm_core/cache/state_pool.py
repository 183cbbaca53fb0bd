"""State slots of a model with recurrent layers: who works on which, and checkpoints from which a prompt can go on.

A slot holds what the recurrent layers keep of one sequence, whose size doesn't depend on the sequence's length. Every
running request works on a slot of its own. A checkpoint is a copy of it as it stood after so many tokens of a prompt,
made on the way by the kernels; it stays, found by the hash of the blocks up to there, until its slot is needed. This
room must not know what a state is made of.
"""

from collections.abc import Sequence

from nanovllm_core.cache.block_pool import NULL_BLOCK, BlockPool
from nanovllm_core.request import MAX_CHECKPOINTS, BlockHash, Checkpoint, Request
from nanovllm_kernels.linear_attention import CHECKPOINT

NULL_SLOT = NULL_BLOCK


def checkpoint_positions(begin: int, end: int, shared: int) -> list[int]:
    """Where a prompt of `end` tokens that is computed from token `begin` on leaves checkpoints, most useful first.

    shared: so many of its tokens others had as well, so that more may leave it there. Beyond that whoever comes next
    most likely leaves it near its end (a conversation that goes on), and a state is as large as thousands of tokens'
    keys: so distances from the end double. A request that shares all but n tokens of a prompt finds a checkpoint at
    most n + CHECKPOINT tokens before it leaves, and their number is at most that of the length's binary digits.
    """
    last = end - end % CHECKPOINT
    distances = [0, *(CHECKPOINT << doublings for doublings in range(MAX_CHECKPOINTS))]
    near_end = (last - distance for distance in distances)
    found = dict.fromkeys([shared - shared % CHECKPOINT, *near_end])
    return [position for position in found if position > begin][:MAX_CHECKPOINTS]


class StatePool:
    """Slots 1..num_slots; slot 0 is the null slot, which padding points at."""

    def __init__(self, num_slots: int, max_running: int, block_size: int):
        self.slots = BlockPool(num_slots)
        self._block_size = block_size
        self._blocks_per_checkpoint = CHECKPOINT // block_size
        self._num_to_come = max_running

    def find(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """The last checkpoint along a chain of blocks: behind how many of them, and its slot; (0, 0) for none."""
        step = self._blocks_per_checkpoint
        for count in range(len(hashes) - len(hashes) % step, 0, -step):
            slot = self.slots.lookup(hashes[count - 1])
            if slot is not None:
                return count, slot
        return 0, NULL_SLOT

    def open(self, request: Request, origin: int, *, begin: int, shared: int, caching: bool) -> None:
        """Give a request, admitted to a row, its slot, and slots for checkpoints as far as nobody else needs them.

        origin: the checkpoint that it starts from, at token `begin`, or the null slot. shared: see
        `checkpoint_positions`.
        """
        slots = self.slots
        # Held meanwhile, it is not what makes room, and counts as just used.
        held = [origin] if origin else []
        for slot in held:
            slots.acquire(slot)
        request.state_origin = origin
        (request.state_slot,) = slots.allocate(1)
        self._num_to_come -= 1
        positions = checkpoint_positions(begin, request.num_tokens, shared) if caching else []
        # Beside one for each row that is still free there must be one more, as their origin may be among them.
        spare = slots.num_free + len(held) - self._num_to_come - 1
        positions = sorted(positions[: max(spare, 0)])
        request.checkpoints = [*map(Checkpoint, positions, slots.allocate(len(positions)))]
        slots.release(held)

    def commit(self, request: Request, num_computed: int) -> None:
        """Let the checkpoints within the first `num_computed` tokens, whose step has ended, be found."""
        checkpoints = request.checkpoints
        while checkpoints and checkpoints[0].position <= num_computed:
            position, slot = checkpoints.pop(0)
            self.slots.register(slot, request.block_hashes[position // self._block_size - 1])
            self.slots.release([slot])

    def close(self, request: Request) -> None:
        """Take back what a request holds."""
        self.slots.release([request.state_slot, *(slot for _, slot in request.checkpoints)])
        request.state_slot, request.checkpoints = NULL_SLOT, []
        self._num_to_come += 1
