"""What one step is to do, in the few numbers that a runner needs.

A plan is small and made of plain values, so that it can travel to other ranks. This room must not know how the
choice was made or how it is carried out.
"""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_core.request import SamplingParams


class BatchShape(NamedTuple):
    """The shape of a step's batch. query_len is set when every request has that many tokens (uniform decode)."""

    num_reqs: int
    num_tokens: int
    query_len: int | None


class ScheduledRow(NamedTuple):
    """A row's part in a step: `num_tokens` more tokens of it, the last of which is sampled from if `samples`."""

    row: int
    num_tokens: int
    samples: bool


class NewBlocks(NamedTuple):
    """Blocks that a row's table gets from entry `start` on."""

    row: int
    start: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that gets a row: all that the device must know of it.

    seed: of its random numbers. stop_ids: what must not come up before `sampling.min_tokens` outputs.
    """

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows that begin, block tables that grow, and which rows compute how many tokens.

    scheduled: rows with one token first. max_seq_len: longest context after the step, in tokens.
    """

    step: int
    new_rows: list[NewRow]
    new_blocks: list[NewBlocks]
    scheduled: list[ScheduledRow]
    shape: BatchShape
    max_seq_len: int


class TokenChoice(NamedTuple):
    """What was sampled for a row: the token and, when asked for, log-probabilities of it and of the likeliest ones."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
