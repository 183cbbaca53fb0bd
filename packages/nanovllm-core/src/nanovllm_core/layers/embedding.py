"""Token embedding and output head, with the vocabulary split over ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_core.layers.weights import WeightedModule, WeightSlot, fill_normal, make_share_copier
from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import own_slice
from nanovllm_kernels.gemm import PackedWeight, logits, pack_linear
from nanovllm_kernels.platform import residual_dtype


class VocabEmbedding(WeightedModule):
    """Looks up a vector for each token id. The vectors have the dtype of the residual stream.

    The table is split over the ranks. It ends with padding rows of zeros, so that all ranks have equally many rows.
    If ranks have different requests, each rank has the whole table instead.

    weight: [rows of this rank, hidden_size].
    head_weight: rows of `weight` that a tied output head uses on this rank.
    """

    def __init__(self, vocab_size: int, hidden_size: int, build: BuildContext):
        super().__init__(build)
        self._parallel = build.for_attention().parallel
        self._shape = (vocab_size, hidden_size)
        head_rows_per_rank = -(-vocab_size // build.parallel.size)
        self._rows_per_rank = head_rows_per_rank * build.parallel.num_request_groups
        self.weight = self.allocate(self._rows_per_rank, hidden_size).zero_()
        self.head_weight = self.weight
        if build.parallel.splits_requests:
            self.head_weight = self.weight[own_slice(build.parallel, head_rows_per_rank)]
        self._out_dtype = residual_dtype(build.dtype, build.device, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] integers -> [T, hidden_size]."""
        if self._parallel.size == 1:
            return functional.embedding(input_ids, self.weight).to(self._out_dtype)
        row_indices = input_ids - self._parallel.rank * self._rows_per_rank
        is_on_other_rank = (row_indices < 0) | (row_indices >= self._rows_per_rank)
        vectors = functional.embedding(row_indices.masked_fill(is_on_other_rank, 0), self.weight)
        return self._parallel.all_reduce(vectors.masked_fill(is_on_other_rank.unsqueeze(-1), 0.0)).to(self._out_dtype)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slot that loads the embedding table."""
        own_rows = own_slice(self._parallel, self.weight.shape[0])
        yield f"{layer_name}.weight", WeightSlot(self._shape, make_share_copier(self.weight, own_rows))

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal vectors."""
        fill_normal(self.weight, generator)


class LMHead(WeightedModule):
    """Computes logits from hidden states. Each rank computes the columns of its share of the vocabulary.

    Padding columns, which follow the vocabulary's columns and make the shares equal, have the logit 0.

    tied_embedding: embedding whose table is also this head's weight; None for a separate weight.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, build: BuildContext, tied_embedding: VocabEmbedding | None = None
    ):
        super().__init__(build)
        self._parallel = build.parallel
        self._shape = (vocab_size, hidden_size)
        self._is_tied = tied_embedding is not None
        if tied_embedding is None:
            self.weight = self.allocate(-(-vocab_size // build.parallel.size), hidden_size).zero_()
        else:
            self.weight = tied_embedding.head_weight
        self._packed = PackedWeight(self.weight, in_onednn_layout=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> float32 [n, ceil(vocab_size / ranks)]."""
        return logits(hidden, self._packed, self.weight)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slot that loads the weight, unless the head is tied."""
        if not self._is_tied:
            own_rows = own_slice(self._parallel, self.weight.shape[0])
            yield f"{layer_name}.weight", WeightSlot(self._shape, make_share_copier(self.weight, own_rows))

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal weights, unless the head is tied."""
        if not self._is_tied:
            fill_normal(self.weight, generator)

    def finish_loading(self) -> None:
        """Pack the weight. On a CPU this copies a tied table, because the faster matmul is worth the memory."""
        self._packed = pack_linear(self.weight)
