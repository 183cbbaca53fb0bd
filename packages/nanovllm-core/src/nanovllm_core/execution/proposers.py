"""Defines the interface of draft proposers, and a proposer that finds drafts in the request's own tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from nanovllm_core.execution.forward import StepTokens
from nanovllm_core.execution.inputs import DeviceRows
from nanovllm_core.execution.request_table import RequestTable, SamplingOps
from nanovllm_core.scheduling.plan import DraftEntryRange
from nanovllm_kernels.request_tables import TokenTables, propose_ngrams

# `NgramProposer` searches for an earlier occurrence of the last n tokens of a request. These are the limits of n.
_MIN_MATCH, _MAX_MATCH = 3, 8

# Value of the argument `ops` of `Proposer.propose`, in place of `SamplingOps`, if no request needs drafts.
NO_DRAFTS = -1

# Samples one token per request. Arguments: logits of this rank's share of n requests; rows in the request table,
# int32 [n]; positions of the new tokens, int32 [n]; `SamplingOps` as an integer. Returns tokens int32 [n].
SampleTokens = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Proposer(ABC):
    """Proposes drafts, after the tokens of a step have been written to the request table.

    CUDA graphs capture `propose`. So `propose` never waits for a GPU, and does the same work for all steps of a shape.

    uses_cache: whether the proposer has cache entries of tokens and drafts, so that proposing takes time and space.
    can_lag: whether a step may skip cache entries of its tokens. `compute_late_draft_entries` computes them later.
    reads_step: whether `propose` reads the step's tokens. If False, steps with equal numbers of requests share graphs.
    """

    uses_cache = can_lag = reads_step = False

    def captured_ops(self, *, may_propose: bool) -> tuple[int, ...]:
        """Values of `ops` for which graphs are captured: least work first, but NO_DRAFTS last. See `select_graph`.

        may_propose: whether a step of the captured shape may propose drafts that take time.
        """
        del may_propose
        return int(~SamplingOps.GREEDY), NO_DRAFTS

    @abstractmethod
    def propose(self, rows: DeviceRows, step: StepTokens, ops: int, sample: SampleTokens) -> tuple[Tensor, Tensor]:
        """Write drafts after the last token of each request that samples.

        Returns (drafts, number of proposed drafts per request), see `propose_ngrams`.
        ops: `SamplingOps` of the requests, combined; NO_DRAFTS to do only what later calls need.
        """

    def warm_up(self, num_tokens: int) -> None:
        """Compile the code that graphs do not contain.

        num_tokens: maximum number of entries that a call of `compute_late_draft_entries` computes.
        """
        if self.can_lag:
            self.compute_late_draft_entries([DraftEntryRange(0, 0, num_tokens)])

    def compute_late_draft_entries(self, entries: Sequence[DraftEntryRange]) -> None:
        """Compute the cache entries of earlier tokens, see `StepPlan.late_draft_entries`. Never captured."""
        raise NotImplementedError(
            f"{type(self).__name__} computes all cache entries in the step: do not call compute_late_draft_entries"
        )


class NgramProposer(Proposer):
    """Finds an earlier occurrence of the request's last tokens, and proposes the tokens that follow it."""

    def __init__(self, table: RequestTable):
        self._table = table

    def propose(self, rows: DeviceRows, step: StepTokens, ops: int, sample: SampleTokens) -> tuple[Tensor, Tensor]:
        """See `Proposer.propose`."""
        del step, ops, sample
        table = self._table
        search_tables = TokenTables(table.search_tokens, table.num_computed + table.max_prediction_tokens)
        return propose_ngrams(
            rows.table_rows,
            rows.is_sampled,
            search_tables,
            num_drafts=table.max_drafts,
            min_match=_MIN_MATCH,
            max_match=_MAX_MATCH,
        )
