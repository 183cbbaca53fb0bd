"""Encodes step plans and batches of cache copies, which rank 0 sends to the other ranks."""

from dataclasses import replace

import msgspec
import numpy as np

from nanovllm_core.cache.host_memory import CopyBatch
from nanovllm_core.parallel.plan_ring import PlanWriter
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.plan import (
    BatchShape,
    DraftEntryRange,
    NewBlocks,
    NewRow,
    NewState,
    PromptLogprobsRange,
    ScheduledRows,
    StepPlan,
)

STOP_MESSAGE = b""  # tells a rank to end


class RowMessage(msgspec.Struct, frozen=True, array_like=True):
    """A `NewRow` without the fields that only rank 0 needs. token_ids, prediction_ids: int32 [n] as bytes."""

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    state: NewState
    prediction_ids: bytes

    @classmethod
    def from_row(cls, new_row: NewRow) -> "RowMessage":
        """The message for `new_row`, without grammar, budget and allowed ids. Rank 0 makes the masks of all ranks."""
        sampling = new_row.sampling
        if sampling.grammar is not None or sampling.reasoning_budget is not None or sampling.allowed_token_ids:
            sampling = replace(sampling, grammar=None, reasoning_budget=None, allowed_token_ids=())
        return cls(
            new_row.row,
            new_row.token_ids.tobytes(),
            new_row.num_prompt_tokens,
            new_row.num_computed_tokens,
            sampling,
            new_row.seed,
            new_row.stop_ids,
            new_row.state,
            new_row.prediction_ids.tobytes(),
        )

    def to_row(self) -> NewRow:
        """The new row."""
        return NewRow(
            self.row,
            np.frombuffer(self.token_ids, np.int32),
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.sampling,
            self.seed,
            self.stop_ids,
            state=self.state,
            prediction_ids=np.frombuffer(self.prediction_ids, np.int32),
        )


class PlanMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A `StepPlan`.

    scheduled: the arrays of `ScheduledRows` as bytes; None if the previous step had the same rows.
    num_masks: number of masks that rank 0 broadcasts before the step chooses tokens.
    """

    step_number: int
    new_rows: list[RowMessage]
    new_blocks: tuple[list[int], list[int], list[int]]
    scheduled: tuple[bytes, bytes, bytes] | None
    shape: BatchShape
    max_seq_len: int
    prompt_logprobs_ranges: list[PromptLogprobsRange]
    num_masks: int
    late_draft_entries: list[DraftEntryRange]


class CopyMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copies between the caches and host memory."""

    batch: CopyBatch


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PlanMessage | CopyMessage).decode


class PlanPublisher:
    """Sends the plans and copies of rank 0 to the other ranks."""

    def __init__(self, writer: PlanWriter):
        self._writer = writer
        self._last_scheduled: ScheduledRows | None = None

    def publish(self, plan: StepPlan, num_masks: int) -> None:
        """Send a plan. Raises an exception if a rank has ended. num_masks: see `PlanMessage`."""
        blocks, scheduled = plan.new_blocks, None
        if plan.scheduled is not self._last_scheduled:
            rows, num_tokens, is_sampled = self._last_scheduled = plan.scheduled
            scheduled = rows.tobytes(), num_tokens.tobytes(), is_sampled.tobytes()
        message = PlanMessage(
            plan.step_number,
            [RowMessage.from_row(new_row) for new_row in plan.new_rows],
            (blocks.rows, blocks.entries, blocks.block_ids),
            scheduled,
            plan.shape,
            plan.max_seq_len,
            plan.prompt_logprobs_ranges,
            num_masks,
            plan.late_draft_entries,
        )
        self._writer.write(_encode(message))

    def publish_copies(self, batch: CopyBatch) -> None:
        """Send a batch of copies. Raises an exception if a rank has ended."""
        self._writer.write(_encode(CopyMessage(batch)))

    def stop(self) -> None:
        """Tell the other ranks to end."""
        self._writer.write(STOP_MESSAGE)


class PlanDecoder:
    """Decodes the messages of `PlanPublisher`, in order."""

    def __init__(self) -> None:
        self._last_scheduled: ScheduledRows | None = None

    def decode(self, payload: bytes) -> tuple[StepPlan, int] | CopyBatch:
        """Returns a plan with its number of masks, or copies.

        Raises ValueError if the first plan refers to a previous plan.
        """
        message: PlanMessage | CopyMessage = _decode(payload)
        if isinstance(message, CopyMessage):
            return message.batch
        if message.scheduled is not None:
            rows, num_tokens, is_sampled = message.scheduled
            self._last_scheduled = ScheduledRows(
                np.frombuffer(rows, np.int64), np.frombuffer(num_tokens, np.int64), np.frombuffer(is_sampled, np.bool_)
            )
        if self._last_scheduled is None:
            raise ValueError("the first plan refers to the rows of an earlier plan")
        plan = StepPlan(
            message.step_number,
            [new_row.to_row() for new_row in message.new_rows],
            NewBlocks(*message.new_blocks),
            self._last_scheduled,
            message.shape,
            message.max_seq_len,
            message.prompt_logprobs_ranges,
            message.late_draft_entries,
        )
        return plan, message.num_masks
