"""Defines the requests of a step (forward pass) and their attention plans. All layers share one `AttentionBatch`."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.attention.plan.gathers import GatherPlan, plan_gathers
from nanovllm_kernels.attention.plan.work_list import WorkList

# Every backend except "torch" uses Triton. "flash" adds FlashAttention for prompts. "cutedsl" adds our CuTe DSL kernel
# for decodes. "fastest" adds each of these two kernels if it is installed and supports the shape.
Backend = Literal["torch", "triton", "flash", "cutedsl", "fastest"]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Holds a step's requests, and one plan per attention kernel. Plans of kernels that the step does not use are None.

    block_tables: int32 [B, max_blocks], page numbers of each request.
    seq_lens: int32 [B], number of tokens of each request, including this step's.
    query_start_loc: int32 [B + 1], index of each request's first query in the step, then the total number of queries.
    max_query_len: upper bound on the number of queries per request.
    max_seq_len: upper bound on the number of tokens per request.
    work_element_bytes: element size for which the work lists were planned, from `tile_configs.tile_element_bytes`.
    uses_numba_gqa: whether the CPU kernel `numba_gqa` computes attention for all requests.
    torch_plan: groups of requests for the backend "torch", which copies the cached tokens of a group together.
    narrow_work: work list (equal shares of attention work) for Triton, in tiles of few queries.
    wide_work: work list for Triton, in tiles of many queries.
    cute_seq_lens: int32 [n], `QueryTiles.visible_lens` if `cute_tiles` is set. Otherwise the number of tokens of each
        request with one query, and 0 for other requests.
    cute_tiles: `QueryTiles.queries`, if the CuTe DSL kernel computes all requests. None: the kernel computes only
        requests with one query.
    num_absorbed_tokens: int32 [1], number of leading tokens that may need attention over latents (absorbed attention).
        Later tokens are padding, or belong to requests without cached tokens. None: all tokens.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    work_element_bytes: int
    uses_numba_gqa: bool = False
    torch_plan: GatherPlan | None = None
    narrow_work: WorkList | None = None
    wide_work: WorkList | None = None
    cute_seq_lens: Tensor | None = None
    cute_tiles: Tensor | None = None
    cute_workspace: tuple[Tensor, ...] = ()  # Buffers of the CuTe DSL kernel.
    flash_requests: FlashRequests | None = None  # The requests that FlashAttention computes.
    num_absorbed_tokens: Tensor | None = None

    @property
    def reads_step_keys(self) -> bool:
        """Whether `paged_attention` reads this step's keys and values from a tensor, in addition to the cache."""
        return self.flash_requests is not None and self.flash_requests.block_tables is None

    def with_gathers(self, num_decodes: int | None, page_size: int, dtype: torch.dtype | None) -> "AttentionBatch":
        """Return a copy with `torch_plan`. Raises ValueError if `num_decodes` is None."""
        if num_decodes is None:
            raise ValueError('num_decodes is None, but the backend "torch" needs it')
        request_tensors = (self.block_tables, self.seq_lens, self.query_start_loc)
        return replace(self, torch_plan=plan_gathers(*request_tensors, num_decodes, page_size, dtype))

    def check_element_size(self, q: Tensor, kv_cache: Tensor) -> None:
        """Raise ValueError if the work lists were not planned for the element sizes of `q` and `kv_cache`."""
        element_bytes = tile_configs.tile_element_bytes(q.element_size(), kv_cache.element_size())
        if element_bytes != self.work_element_bytes:
            raise ValueError(f"the batch was not planned for queries of {q.dtype}: pass dtype={q.dtype} to the plan")


class PagedRequests(NamedTuple):
    """Holds a paged cache, and a step's requests as in `AttentionBatch`. kv_scales: None unless the cache is FP8."""

    kv_cache: Tensor
    kv_scales: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
