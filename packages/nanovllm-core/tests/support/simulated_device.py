"""A simulated device, its host memory and its files. The device checks every slot that it reads."""

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from nanovllm_core.cache.file_tier import FileRead
from nanovllm_core.cache.host_memory import CopyBatch, Direction, EntryCopies, EntryKind, HostLayout
from nanovllm_core.outputs import PromptLogprobs
from nanovllm_core.request_state import BlockHash
from nanovllm_core.scheduling.plan import DraftResults, NewRow, NewState, PromptLogprobsRange, StepPlan, StepResults

VOCAB = 50
EOS = 0


def digest(previous_digest: int, token: int) -> int:
    # Integers, unlike strings, have the same hash in each interpreter.
    return hash((previous_digest, token))


def next_token(prefix_digest: int, eos_rate: int) -> int:
    return EOS if prefix_digest % 997 < eos_rate else 1 + prefix_digest % (VOCAB - 1)


@dataclass
class Device:
    """A simulated device of one group of requests. Each cache slot and state slot holds a digest of all tokens so far.

    tables: block id by row and entry.
    states: digest by state slot; None for a model without recurrent layers.
    """

    block_size: int
    eos_rate: int
    slots: dict[int, int] = field(default_factory=dict)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    states: dict[int, int] | None = None
    state_of: dict[int, NewState] = field(default_factory=dict)
    max_drafts: int = 0
    drafts: dict[int, list[int]] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def restore_states(self, new_rows: Sequence[NewRow]) -> None:
        assert self.states is not None
        source_slots = [new.state.source_slot for new in new_rows if new.state.source_slot]
        source_digests = {slot: self.states[slot] for slot in source_slots}
        for new in new_rows:
            assert bool(new.state.source_slot) == bool(new.num_computed_tokens)
            self.states[new.state.slot] = source_digests[new.state.source_slot] if new.state.source_slot else 1
            self.state_of[new.row] = new.state

    def advance_state(self, row: int, previous_digest: int, new_digest: int, position: int) -> None:
        assert self.states is not None
        slot, _, checkpoints = self.state_of[row]
        assert self.states[slot] == previous_digest, "a state slot holds another prompt's state"
        self.states[slot] = new_digest
        for checkpoint in checkpoints:
            if checkpoint.position == position + 1:
                self.states[checkpoint.slot] = new_digest

    def add_rows(self, new_rows: Sequence[NewRow]) -> None:
        if self.states is not None:
            self.restore_states(new_rows)
        for new in new_rows:
            self.tokens[new.row] = new.token_ids.tolist()
            self.computed[new.row] = new.num_computed_tokens
            self.tables[new.row] = {}

    def compute(self, row: int, count: int) -> list[tuple[int, int, int]]:
        """Returns (row, position, digest of the tokens so far) of each computed token."""
        prefix_digest, hidden_states = 1, []
        end = self.computed[row] + count
        for position, token in enumerate((self.tokens[row] + self.drafts.get(row, []))[:end]):
            previous_digest, prefix_digest = prefix_digest, digest(prefix_digest, token)
            slot = self.tables[row][position // self.block_size] * self.block_size + position % self.block_size
            if position >= self.computed[row]:
                self.slots[slot] = prefix_digest
            if position >= self.computed[row] and self.states is not None:
                self.advance_state(row, previous_digest, prefix_digest, position)
            assert self.slots[slot] == prefix_digest, "a cached block holds another prompt's keys"
            if position >= self.computed[row]:
                hidden_states.append((row, position, prefix_digest))
        self.computed[row] = end
        return hidden_states

    def sample(self, row: int, prefix_digest: int) -> int:
        self.tokens[row].append(next_token(prefix_digest, self.eos_rate))
        return self.tokens[row][-1]

    def verify(self, row: int, hidden_states: list[tuple[int, int, int]]) -> list[int]:
        """Returns the tokens sampled after the last token and after each draft, up to the first wrong draft."""
        drafts = self.drafts[row][: len(hidden_states) - 1]
        self.computed[row] -= len(drafts)
        tokens = [self.sample(row, hidden_states[0][2])]
        for draft, (_, _, prefix_digest) in zip(drafts, hidden_states[1:], strict=True):
            if tokens[-1] != draft:
                break
            self.computed[row] += 1
            tokens.append(self.sample(row, prefix_digest))
        return tokens

    def propose(self, row: int) -> int:
        """Returns how many of the proposed drafts the scheduler may use."""
        *_, prefix_digest = accumulate(self.tokens[row], digest, initial=1)
        drafts: list[int] = []
        for _ in range(self.max_drafts):
            correct_token = next_token(prefix_digest, self.eos_rate)
            drafts.append(correct_token if self.rng.random() < 0.7 else self.rng.randrange(VOCAB))
            prefix_digest = digest(prefix_digest, drafts[-1])
        self.drafts[row] = drafts
        return self.rng.randrange(self.max_drafts + 1)

    def score(self, part: PromptLogprobsRange, hidden_states: list[tuple[int, int, int]]) -> PromptLogprobs:
        """Returns digests in place of log-probabilities."""
        ranks = []
        for row, position, prefix_digest in hidden_states[
            part.first_logits_index : part.first_logits_index + part.num_tokens
        ]:
            assert (row, position) == (part.row, part.start + len(ranks) - 1), "the hidden state of another token"
            ranks.append(digest(prefix_digest, self.tokens[row][position + 1]))
        return PromptLogprobs(part.num_top, b"", np.array(ranks, np.int64).tobytes(), b"", b"")


class SimulatedHost:
    """Host memory whose copies take several steps. Some copies fail and leave garbage."""

    def __init__(self, layout: HostLayout, devices: Sequence[Device], rng: random.Random, failure_rate: float):
        self.layout, self.devices, self.rng, self.failure_rate = layout, devices, rng, failure_rate
        self.is_ready = True
        self.num_failures = 0
        self.contents: dict[tuple[EntryKind, int], list[int | None]] = {}
        self.done = Counter[Direction]()
        # A batch in flight is a list of the parts that are not copied yet.
        self.pending: dict[Direction, deque[list[EntryCopies]]] = {direction: deque() for direction in Direction}

    def launch(self, batches: Sequence[CopyBatch]) -> None:
        for direction, copies in batches:
            parts = [
                EntryCopies(group, kind, [entry], [slot])
                for group, kind, entries, slots in copies
                for entry, slot in zip(entries, slots, strict=True)
            ]
            self.rng.shuffle(parts)
            self.pending[direction].append(parts)

    def advance(self) -> None:
        for direction in Direction:
            while self.pending[direction] and self.rng.random() < 0.7:
                parts = self.pending[direction][0]
                while parts and self.rng.random() < 0.8:
                    self.copy(direction, parts.pop())
                if not parts:
                    self.pending[direction].popleft()
                    self.done[direction] += 1

    def copy(self, direction: Direction, part: EntryCopies) -> None:
        device, (entry,), (slot,) = self.devices[part.group], part.entries, part.slots
        if part.kind is EntryKind.BLOCK:
            memory, keys = device.slots, range(entry * device.block_size, (entry + 1) * device.block_size)
        else:
            memory, keys = device.states, range(entry, entry + 1)
        assert memory is not None
        values = [memory.get(key) for key in keys] if direction is Direction.STORE else self.contents[part.kind, slot]
        if self.rng.random() < self.failure_rate:
            self.num_failures += 1
            values = [0] * len(values)
        if direction is Direction.STORE:
            self.contents[part.kind, slot] = values
        else:
            memory.update(zip(keys, values, strict=True))

    def num_done(self, direction: Direction) -> int:
        return self.done[direction]


class SimulatedFiles:
    """A tier of files whose reads and writes take several steps. Some files are missing when they are read."""

    def __init__(self, host: SimulatedHost, rng: random.Random):
        self.host, self.rng = host, rng
        self.contents: dict[tuple[EntryKind, BlockHash], list[int | None]] = {}
        self.writes: dict[tuple[EntryKind, BlockHash], int] = {}
        self.is_busy = False

    def contains(self, kind: EntryKind, block_hash: BlockHash) -> bool:
        return (kind, block_hash) in self.contents

    def predict_read(self, kinds: Iterable[EntryKind]) -> float:
        return float(len(list(kinds)))

    def reject_read(self) -> None:
        pass

    def read(self, kind: EntryKind, block_hash: BlockHash, slot: int) -> FileRead:
        return FileRead(kind, block_hash, slot, SimulatedFuture(self.rng))

    def end_read(self, read: FileRead) -> bool:
        values = self.contents.get((read.kind, read.block_hash))
        if self.rng.random() < 0.1:
            values = self.contents.pop((read.kind, read.block_hash), None) and None
        self.host.contents[read.kind, read.slot] = [0] if values is None else values
        return values is not None

    @property
    def is_full(self) -> bool:
        return len(self.writes) >= 3

    def is_written_or_queued(self, kind: EntryKind, block_hash: BlockHash) -> bool:
        return (kind, block_hash) in self.contents or (kind, block_hash) in self.writes

    def start_write(self, kind: EntryKind, block_hash: BlockHash, slot: int) -> None:
        self.writes[kind, block_hash] = slot
        self.is_busy = True

    def take_written(self) -> list[tuple[EntryKind, int]]:
        ended = [key for key in self.writes if self.rng.random() < 0.3]
        written = [(kind, self.writes.pop((kind, block_hash))) for kind, block_hash in ended]
        for key, (kind, slot) in zip(ended, written, strict=True):
            self.contents[key] = self.host.contents[kind, slot]
        self.is_busy = bool(self.writes)
        return written


class SimulatedFuture:
    def __init__(self, rng: random.Random):
        self.rng = rng
        self.is_done = False

    def done(self) -> bool:
        self.is_done = self.is_done or self.rng.random() < 0.5
        return self.is_done


def run_plan(devices: Sequence[Device], rows_per_group: int, plan: StepPlan) -> StepResults:
    for group, device in enumerate(devices):
        device.add_rows([new for new in plan.new_rows if new.row // rows_per_group == group])
    blocks = plan.new_blocks
    for row, entry, block in zip(blocks.rows, blocks.entries, blocks.block_ids, strict=True):
        devices[row // rows_per_group].tables[row][entry] = block
    sampled_tokens, hidden_states, num_tokens, num_proposed = [], [], [], []
    for row, count, samples in zip(*(column.tolist() for column in plan.scheduled), strict=True):
        device = devices[row // rows_per_group]
        if not (device.max_drafts and plan.shape.has_drafts):
            device.drafts[row] = []
        row_states = device.compute(row, count)
        hidden_states += row_states
        if plan.shape.has_drafts:
            assert samples
            assert len(row_states) == count <= 1 + device.max_drafts
            new_tokens = device.verify(row, row_states)
        else:
            assert samples == (device.computed[row] == len(device.tokens[row]))
            new_tokens = [device.sample(row, row_states[-1][2])] if samples else []
        if samples:
            sampled_tokens += new_tokens
            num_tokens.append(len(new_tokens))
            num_proposed.append((row, device.propose(row)))
    drafts = None
    if devices[0].max_drafts:
        draft_ids = [devices[row // rows_per_group].drafts[row] for row, _ in num_proposed]
        drafts = DraftResults(
            np.array(num_tokens, np.int64),
            np.array([count for _, count in num_proposed], np.int64),
            np.array(draft_ids, np.int32).reshape(-1, devices[0].max_drafts),
        )
    scores = [devices[part.row // rows_per_group].score(part, hidden_states) for part in plan.prompt_logprobs_ranges]
    return StepResults(np.array(sampled_tokens, np.int32), (), (), scores, drafts)
