"""Defines the engine's state of a request."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from nanovllm_core.grammar_types import CompiledGrammar
from nanovllm_core.request import Request
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.token_ids import TokenIds

BlockHash = int | bytes
MAX_CHECKPOINTS = 16  # maximum number of recurrent states that one prompt saves


class Checkpoint(NamedTuple):
    """A saved state of a recurrent model. slot: state slot that holds the state after `position` tokens."""

    position: int
    slot: int


class RequestStatus(Enum):
    """Tells what a request waits for. Preemption changes RUNNING to WAITING.

    WAITING_KV: cached blocks are being fetched from another engine or loaded from host memory. After a load, the
        request keeps this status until it starts. After a fetch, or if it can't use the loaded blocks, the request is
        WAITING again.
    """

    WAITING_GRAMMAR = "waiting for its grammar"
    WAITING = "waiting"
    WAITING_KV = "waiting for its cached prefix"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the engine. `RowTable` has the numbers that change in every step.

    key: the engine's id of the request; unique in an engine.
    compiled_grammar: set before the request is scheduled; None without a grammar.
    output_ids: ids of the output tokens that have reached the host.
    seed: the client's seed, or a seed that the engine draws.
    max_total_tokens: number of prompt and output tokens at which the request finishes.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
    scheduled_time: value of `time.monotonic` at the first admission.
    num_unfair_steps: number of consecutive steps in which the request was the oldest prompt, but got less than its
        share. Steps for which the request was no candidate, because no row was free, do not count.
    num_scheduled_prompt_logprobs: number of prompt tokens whose log-probabilities a step has computed or will compute.
    row: index of the request in the tables of the scheduler and of the device; -1 without a row.
    block_hashes: hashes of the full blocks, in order. A hash covers the block and all tokens before the block.
    num_committed_blocks: number of leading blocks that are in the prefix cache.
    has_started_load: whether a load of the prefix has begun, so that `CacheManager.start_load` begins no other load.
    state_slot: slot that holds the state of a recurrent model; 0 for other models.
    source_state_slot: slot of the checkpoint that becomes the initial state; 0 for an initial state of zeros.
    checkpoints: checkpoints that are planned but not saved yet, in order of position.
    """

    key: int
    client_request: Request
    compiled_grammar: CompiledGrammar | None = None
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = field(default_factory=list[int])
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    max_total_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    scheduled_time: float = 0.0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    num_unfair_steps: int = 0
    num_scheduled_prompt_logprobs: int = 0
    row: int = -1
    block_ids: list[int] = field(default_factory=list[int])
    block_hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    num_committed_blocks: int = 0
    has_started_load: bool = False
    state_slot: int = 0
    source_state_slot: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])

    @property
    def prompt_ids(self) -> TokenIds:
        """Token ids of the prompt."""
        return self.client_request.prompt_ids

    @property
    def sampling(self) -> SamplingParams:
        """Sampling options."""
        return self.client_request.sampling

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.client_request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and output tokens. Counts only output tokens that have reached the host."""
        return len(self.client_request.prompt_ids) + len(self.output_ids)

    @property
    def num_unscheduled_prompt_logprobs(self) -> int:
        """Number of prompt tokens whose log-probabilities are requested, but not scheduled yet."""
        if self.sampling.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - 1 - self.num_scheduled_prompt_logprobs

    def token_ids(self) -> TokenIds:
        """The prompt followed by the output."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, np.int32)))
