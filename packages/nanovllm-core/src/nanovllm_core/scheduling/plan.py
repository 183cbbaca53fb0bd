"""The types of one step: its plan, the scheduler's data about the step, and its results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.grammar_types import CompiledGrammar
from nanovllm_core.outputs import PromptLogprobs, TokenLogprobs
from nanovllm_core.request_state import Checkpoint, RequestState
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.step_time import StepWork
from nanovllm_core.token_ids import TokenIds, as_token_ids

RowIndices = NDArray[np.int64]


class BatchShape(NamedTuple):
    """The shape of a step's batch.

    num_reqs, num_tokens: maximum numbers of requests and of tokens of a group (see `Scheduler`).
    query_len: number of tokens per request; None if this number differs between requests, or if the step has drafts.
    has_only_whole_prompts: whether the step has prompts, and each chunk of several tokens starts at position 0.
    has_drafts: whether the step consists of decodes with drafts. A request's tokens after the first are then drafts,
        and the step samples a token after every token.
    proposes: with speculation, whether the step proposes drafts for the next step.
    """

    num_reqs: int
    num_tokens: int
    query_len: int | None
    has_only_whole_prompts: bool = False
    has_drafts: bool = False
    proposes: bool = True


class ScheduledRows(NamedTuple):
    """The rows that a step computes. Rows with one token come first. Prompts that start at position 0 come last.

    rows: int64 [n], indices into `RowTable`.
    num_tokens: int64 [n], number of tokens that the step computes for each row.
    is_sampled: bool [n], whether the step samples a token for the row. A step with drafts may sample several tokens.
    """

    rows: RowIndices
    num_tokens: NDArray[np.int64]
    is_sampled: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """New entries of the block table: block_table[rows[i], entries[i]] becomes block_ids[i]."""

    rows: list[int] = field(default_factory=list[int])
    entries: list[int] = field(default_factory=list[int])  # positions in the row's list of blocks
    block_ids: list[int] = field(default_factory=list[int])

    def add(self, row: int, first_entry: int, block_ids: Sequence[int]) -> None:
        """Set the entries of `row` from `first_entry` on to `block_ids`."""
        self.rows.extend([row] * len(block_ids))
        self.entries.extend(range(first_entry, first_entry + len(block_ids)))
        self.block_ids.extend(block_ids)


class NewState(NamedTuple):
    """The recurrent state of a new row, and the checkpoints (copies of the state) to save.

    slot: slot that holds the state; 0 for a model without recurrent layers.
    source_slot: slot of the checkpoint from which the row starts; 0 if the row's state starts from zeros.
    """

    slot: int
    source_slot: int
    checkpoints: tuple[Checkpoint, ...]


NO_STATE = NewState(0, 0, ())


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that gets a row.

    token_ids: the prompt, and after a preemption also the existing output.
    """

    row: int
    token_ids: TokenIds
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    compiled_grammar: CompiledGrammar | None = None
    state: NewState = NO_STATE
    prediction_ids: TokenIds = field(default_factory=lambda: as_token_ids(()))


class DraftEntryRange(NamedTuple):
    """Consecutive tokens whose cache entries a draft model computes. start: position of the first token in the row."""

    row: int
    start: int
    num_tokens: int


class PromptLogprobsRange(NamedTuple):
    """Consecutive prompt tokens whose log-probabilities a step computes.

    start: position of the first token in the prompt.
    num_top: number of likeliest tokens to report at each position.
    first_logits_index: index of the token at `start - 1` among all tokens of the step. Its logits predict the token
        at `start`.
    """

    row: int
    start: int
    num_tokens: int
    num_top: int
    first_logits_index: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step: changes of the device tables, and the rows to compute.

    step_number: index of the step since the engine's start, from 0.
    max_seq_len: maximum context length after the step, in tokens.
    late_draft_entries: earlier tokens whose cache entries a draft model computes in this step.
    """

    step_number: int
    new_rows: list[NewRow]
    new_blocks: NewBlocks
    scheduled: ScheduledRows
    shape: BatchShape
    max_seq_len: int
    prompt_logprobs_ranges: list[PromptLogprobsRange] = field(default_factory=list[PromptLogprobsRange])
    late_draft_entries: list[DraftEntryRange] = field(default_factory=list[DraftEntryRange])


class RequestColumns(NamedTuple):
    """Rows with their requests, request keys and lists of output tokens."""

    rows: RowIndices
    requests: list[RequestState]
    keys: list[int]
    output_ids: list[list[int]]


class ScheduledStep(NamedTuple):
    """A step in flight: the plan for the runner, and the scheduler's data for applying the results.

    num_computed_tokens: int64 [n], number of computed tokens of each scheduled row after the step, if neither this
        step nor an earlier step in flight rejects a draft.
    decode_columns: the rows and requests of a step without prompts; None for a step with prompts.
    predicted_s: predicted time of the step; 0 for a step without prompts.
    has_proposals: bool [n], whether later steps may use the drafts that this step proposes for each scheduled row.
    """

    plan: StepPlan
    num_computed_tokens: NDArray[np.int64]
    decode_columns: RequestColumns | None
    work: StepWork
    predicted_s: float
    has_proposals: NDArray[np.bool_]

    @property
    def num_drafts(self) -> NDArray[np.int64]:
        """Number of drafts of each sampled row."""
        scheduled = self.plan.scheduled
        return (scheduled.num_tokens[scheduled.is_sampled] - 1) * self.plan.shape.has_drafts


class DraftResults(NamedTuple):
    """Results of a finished step with speculation, for the sampled rows in the plan's order.

    num_tokens: int64 [n], number of new tokens of each row: the accepted drafts and one further token.
    num_proposed: int64 [n], number of drafts that are proposed for the row's next step.
    draft_ids: int32 [n, max_drafts], tokens after the row's last token, which this step or earlier steps proposed.
    """

    num_tokens: NDArray[np.int64]
    num_proposed: NDArray[np.int64]
    draft_ids: NDArray[np.int32]


class StepResults(NamedTuple):
    """The results of a step.

    tokens: int32 [m], the new tokens of the sampled rows, in the plan's order. Each row has one token
        if `drafts` is None, else `drafts.num_tokens` tokens.
    logprobs: pairs (index into `tokens`, log-probabilities) of rows that ask for log-probabilities.
    grammar_failures: pairs (index of the row among the sampled rows, reason) of rows whose grammar failed. The tokens
        of these rows are meaningless.
    prompt_logprobs: one `PromptLogprobs` per `PromptLogprobsRange` of the plan, in the same order.
    drafts: None without speculation, or if no row samples.
    """

    tokens: NDArray[np.int32]
    logprobs: Sequence[tuple[int, TokenLogprobs]]
    grammar_failures: Sequence[tuple[int, str]] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    drafts: DraftResults | None = None

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Number of new tokens of each sampled row, int64 [n]."""
        return np.ones(len(self.tokens), np.int64) if self.drafts is None else self.drafts.num_tokens
