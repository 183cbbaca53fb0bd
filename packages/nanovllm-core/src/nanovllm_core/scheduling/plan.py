"""The plan of one step, which the scheduler makes and the runner executes, and the results of the step.

A plan consists of plain values, so that it can be sent to other ranks, and of columns over all requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.grammar_types import CompiledGrammar
from nanovllm_core.outputs import PromptLogprobs, TokenLogprobs
from nanovllm_core.request_state import Checkpoint
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.token_ids import TokenIds


class BatchShape(NamedTuple):
    """The shape of a step's batch.

    query_len: tokens per request if all requests have the same number (uniform decode); else None.
    whole: whether no request with several tokens in the step has computed tokens before the step.
    """

    num_reqs: int
    num_tokens: int
    query_len: int | None
    whole: bool = False


class ScheduledRows(NamedTuple):
    """The rows that a step computes: rows with one token first, prompts without computed tokens last.

    Consecutive steps may share one object.
    rows: int64 [n].
    num_tokens: int64 [n], tokens that the step computes for each row.
    samples: bool [n], whether the step samples a token after the last of them.
    """

    rows: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    samples: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """New entries of block tables: entry `entries[i]` of row `rows[i]` becomes `block_ids[i]`."""

    rows: list[int] = field(default_factory=list[int])
    entries: list[int] = field(default_factory=list[int])
    block_ids: list[int] = field(default_factory=list[int])

    def add(self, row: int, start: int, block_ids: Sequence[int]) -> None:
        """Set the entries of a row from `start` on to `block_ids`."""
        self.rows.extend([row] * len(block_ids))
        self.entries.extend(range(start, start + len(block_ids)))
        self.block_ids.extend(block_ids)


class NewState(NamedTuple):
    """The state slot of a request, the slot it is copied from (0 for zeros), and the checkpoints to save."""

    slot: int
    source_slot: int
    checkpoints: tuple[Checkpoint, ...]


NO_STATE = NewState(0, 0, ())


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that gets a row, with all data that the device needs.

    token_ids: the prompt and the outputs that the host knows.
    stop_ids: tokens that may not be sampled before `sampling.min_tokens` outputs.
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


class PromptPart(NamedTuple):
    """Prompt tokens whose log-probabilities a step computes.

    start, num_tokens: the tokens, by position in the prompt. num_top: alternatives to report per token.
    at: index among the step's tokens of the token before the first of them; the others follow in order.
    """

    row: int
    start: int
    num_tokens: int
    num_top: int
    at: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step: changes of the device tables, and the rows to compute.

    max_seq_len: longest context after the step, in tokens.
    prompt_logprobs: prompt tokens whose log-probabilities the step computes.
    """

    step: int
    new_rows: list[NewRow]
    new_blocks: NewBlocks
    scheduled: ScheduledRows
    shape: BatchShape
    max_seq_len: int
    prompt_logprobs: list[PromptPart] = field(default_factory=list[PromptPart])


class StepResults(NamedTuple):
    """The results of a step.

    tokens: int32 [n], one per row of the plan that samples, in the plan's order.
    logprobs: pairs (index into `tokens`, log-probabilities) for rows that asked for them.
    failed: pairs (index into `tokens`, reason) for rows whose grammar failed; their tokens mean nothing.
    prompt_logprobs: one entry per `PromptPart` of the plan.
    """

    tokens: NDArray[np.int32]
    logprobs: Sequence[tuple[int, TokenLogprobs]]
    failed: Sequence[tuple[int, str]] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
