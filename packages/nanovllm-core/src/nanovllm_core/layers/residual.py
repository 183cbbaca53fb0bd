"""The residual stream between layers, and the ranks' partial results that are not yet added to it."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from nanovllm_core.parallel import ParallelContext


class ResidualStream(NamedTuple):
    """A residual stream [T, hidden]: `residual` plus the sum of `partial` over all ranks.

    The next norm adds the sum of `partial` to `residual`. One kernel can then exchange the ranks' parts, add them and
    normalise (see `RMSNorm`).

    residual: equal on all ranks, unless the ranks have different requests.
    partial: this rank's part of the results since the last norm; None if there are no such results. A layer that
        is not split over ranks adds its results to `residual` at once. If ranks have different requests, `partial` has
        the rows of all ranks' requests (`ParallelContext.gather_requests`).
    """

    residual: Tensor
    partial: Tensor | None = None

    def add(self, parallel: ParallelContext, add_result: Callable[[Tensor | None], Tensor]) -> "ResidualStream":
        """Add this rank's part of a result.

        add_result: returns its argument [T, hidden] plus the result, or the result if the argument is None. May
            overwrite its argument.
        """
        if parallel.size == 1:
            return ResidualStream(add_result(self.residual))
        return ResidualStream(self.residual, add_result(self.partial))

    def complete(self, parallel: ParallelContext) -> Tensor:
        """Return `residual` plus the sum of `partial` over all ranks, [T, hidden]. For callers that apply no norm."""
        if self.partial is None:
            return self.residual
        return self.residual + parallel.sum_for_requests(self.partial).to(self.residual.dtype)
