"""The embedding of token ids and the projection to logits, with the vocabulary split over ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_core.layers.weights import Slot, WeightedModule, copy_share, fill_normal
from nanovllm_core.model import BuildContext
from nanovllm_kernels.gemm import PackedWeight, logits, pack_linear
from nanovllm_kernels.platform import residual_dtype


class VocabEmbedding(WeightedModule):
    """A table with one vector per token: [T] -> [T, hidden_size]. Each rank holds an even share of the tokens.

    The result is the start of the residual stream and has the stream's dtype.
    Raises ValueError if the ranks can't share the vocabulary evenly.
    """

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext):
        super().__init__(build)
        self._parallel = build.parallel
        self._shape = (vocab_size, hidden_size)
        self._share = build.parallel.share(vocab_size, "vocab_size")
        self.weight = self.allocate(self._share, hidden_size)
        self._out_dtype = residual_dtype(build.dtype, build.device, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] integers -> [T, hidden_size]."""
        if self._parallel.size == 1:
            return functional.embedding(input_ids, self.weight).to(self._out_dtype)
        local = input_ids - self._parallel.rank * self._share
        elsewhere = (local < 0) | (local >= self._share)
        vectors = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._parallel.all_reduce(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0)).to(self._out_dtype)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The table."""
        first = self._parallel.rank * self._share
        yield f"{name}.weight", Slot(self._shape, copy_share(self.weight, slice(first, first + self._share)))

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal vectors."""
        fill_normal(self.weight, generator)


class LMHead(WeightedModule):
    """Hidden states to logits: [n, hidden_size] -> float32 [n, vocab_size], gathered over ranks.

    tied: the embedding whose table this head uses; None for a table of its own. The storage is shared, except on a CPU,
        where a packed copy is faster and worth its memory.
    """

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext, tied: VocabEmbedding | None = None):
        super().__init__(build)
        self._parallel = build.parallel
        self._shape = (vocab_size, hidden_size)
        self._share = build.parallel.share(vocab_size, "vocab_size")
        self._is_tied = tied is not None
        self.weight = self.allocate(self._share, hidden_size) if tied is None else tied.weight
        self._packed = PackedWeight(self.weight, in_onednn_layout=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> float32 [n, vocab_size]."""
        return self._parallel.all_gather(logits(hidden, self._packed, self.weight))

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The weight, unless it is the embedding's."""
        if not self._is_tied:
            own_rows = slice(self._parallel.rank * self._share, (self._parallel.rank + 1) * self._share)
            yield f"{name}.weight", Slot(self._shape, copy_share(self.weight, own_rows))

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal weights, unless they are the embedding's."""
        if not self._is_tied:
            fill_normal(self.weight, generator)

    def finish(self) -> None:
        """Pack the weight where that is faster."""
        self._packed = pack_linear(self.weight)
