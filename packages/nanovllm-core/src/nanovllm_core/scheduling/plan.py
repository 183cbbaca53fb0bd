"""What one step is to do, in the few numbers that a runner needs.

A plan is small and made of plain values, so that it can travel to other ranks; what it says of every request is
columns, so that nobody need look at requests one by one. This room must not know how the choice was made or how it is
carried out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.request import Checkpoint, CompiledGrammar, PromptLogprobs, SamplingParams, TokenLogprobs
from nanovllm_core.token_ids import TokenIds


class BatchShape(NamedTuple):
    """The shape of a step's batch.

    query_len: set when every request has that many tokens (uniform decode).
    whole: whether all requests with several tokens have no computed ones before the step.
    """

    num_reqs: int
    num_tokens: int
    query_len: int | None
    whole: bool = False


class ScheduledRows(NamedTuple):
    """Who takes part in a step: n rows, those with one token first, prompts of which nothing was computed last. One
    object may stand for one step after another.

    rows: int64 [n]. num_tokens: int64 [n], how many more tokens each computes. samples: bool [n], whether the last of
    them is sampled from.
    """

    rows: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    samples: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """How block tables grow: entry `entries[i]` of row `rows[i]` becomes `block_ids[i]`."""

    rows: list[int] = field(default_factory=list[int])
    entries: list[int] = field(default_factory=list[int])
    block_ids: list[int] = field(default_factory=list[int])

    def add(self, row: int, start: int, block_ids: Sequence[int]) -> None:
        """Let a row have `block_ids` from entry `start` on."""
        self.rows.extend([row] * len(block_ids))
        self.entries.extend(range(start, start + len(block_ids)))
        self.block_ids.extend(block_ids)


class NewState(NamedTuple):
    """The slot that holds a request's state, as a copy of another (`origin`; 0: it begins without one), and the
    checkpoints that are to be made of it.
    """

    slot: int
    origin: int
    checkpoints: tuple[Checkpoint, ...]


NO_STATE = NewState(0, 0, ())


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that gets a row: all that the device must know of it.

    token_ids: the prompt and the outputs that the host knows. seed: of its random numbers. stop_ids: what must not come
    up before `sampling.min_tokens` outputs. compiled: its grammar, if it has one. state: for a recurrent model.
    """

    row: int
    token_ids: TokenIds
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    compiled: CompiledGrammar | None = None
    state: NewState = NO_STATE


class PromptPart(NamedTuple):
    """Tokens of a prompt, `num_tokens` from `start` on, whose log-probabilities, `num_top` beside each, are wanted.

    row: whose prompt. at: which of the step's tokens is the one before the first of them; the others follow it.
    """

    row: int
    start: int
    num_tokens: int
    num_top: int
    at: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows that begin, block tables that grow, and which rows compute how many tokens.

    max_seq_len: longest context after the step, in tokens. prompt_logprobs: what it tells of prompts beside tokens.
    """

    step: int
    new_rows: list[NewRow]
    new_blocks: NewBlocks
    scheduled: ScheduledRows
    shape: BatchShape
    max_seq_len: int
    prompt_logprobs: list[PromptPart] = field(default_factory=list[PromptPart])


class StepTokens(NamedTuple):
    """What a step sampled. tokens: int32, one for each row of the plan that samples, in its order.

    logprobs: which of the tokens, and its log-probabilities, where they were asked for. failed: which of them stand for
    nothing, as the request's grammar has failed, and why. prompt_logprobs: one for each of the plan's.
    """

    tokens: NDArray[np.int32]
    logprobs: Sequence[tuple[int, TokenLogprobs]]
    failed: Sequence[tuple[int, str]] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
