"""Describes a step's requests to attention. All layers read one batch, from `plan_batch` or `plan_latent_batch`."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.attention.plan.gathers import GatherPlan, plan_gathers
from nanovllm_kernels.attention.plan.work_list import WorkList

# Every backend except "torch" uses Triton. "flash" adds FlashAttention for prompts, "cutedsl" our CuTe DSL kernel for
# decodes. "fastest" adds both, where they are installed and support the shape.
Backend = Literal["torch", "triton", "flash", "cutedsl", "fastest"]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of a step, and the plan of each kernel that attends for some requests. Unused plans are None.

    block_tables, seq_lens, query_start_loc, max_query_len, max_seq_len: see `plan_batch`.
    work_element_bytes: element size in bytes for which work lists are planned, see `tile_configs.tile_element_bytes`.
    reads_cache_in_place: whether `numba_gqa` attends for all requests, directly from the cache.
    gather_plan: cached tokens that plain torch gathers.
    narrow_work, wide_work: work lists for Triton, with narrow tiles (few queries) and with wide tiles (many queries).
    cute_decode_lens: int32, at most [B], tokens of each request of the CuTe DSL kernel (one query), 0 for others.
    cute_workspace: memory of the CuTe DSL kernel; empty without `cute_decode_lens`.
    flash_requests: requests for which FlashAttention attends.
    num_absorbed_tokens: int32 [1], for latent caches: all tokens of the step from this index on are unused or in
        whole prompts. A whole prompt has all of its tokens in the step.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    work_element_bytes: int
    reads_cache_in_place: bool = False
    gather_plan: GatherPlan | None = None
    narrow_work: WorkList | None = None
    wide_work: WorkList | None = None
    cute_decode_lens: Tensor | None = None
    cute_workspace: tuple[Tensor, ...] = ()
    flash_requests: FlashRequests | None = None
    num_absorbed_tokens: Tensor | None = None

    @property
    def reads_own_keys(self) -> bool:
        """Whether `paged_attention` reads the step's own keys and values in addition to the cache."""
        return self.flash_requests is not None and self.flash_requests.block_tables is None

    def with_gathers(self, num_decodes: int | None, page_size: int, dtype: torch.dtype | None) -> "AttentionBatch":
        """Return the batch with a plan for plain torch. Raises ValueError if `num_decodes` is None."""
        if num_decodes is None:
            raise ValueError('num_decodes is None, but the backend "torch" needs it')
        tables = (self.block_tables, self.seq_lens, self.query_start_loc)
        return replace(self, gather_plan=plan_gathers(*tables, num_decodes, page_size, dtype))

    def check_element_size(self, q: Tensor, kv_cache: Tensor) -> None:
        """Raise ValueError if the work lists were planned for elements of another size, hence for other tiles."""
        element_bytes = tile_configs.tile_element_bytes(q.element_size(), kv_cache.element_size())
        if element_bytes != self.work_element_bytes:
            raise ValueError(f"the batch was not planned for queries of {q.dtype}: pass dtype={q.dtype} to the plan")


class PagedRequests(NamedTuple):
    """Requests whose tokens are cached in pages. `paged_attention` and `plan_batch` describe the fields."""

    kv_cache: Tensor
    kv_scales: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
