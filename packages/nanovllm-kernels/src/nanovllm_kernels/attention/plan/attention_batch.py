"""The batch of a step, which attention in every layer reads. `plan_batch` and `plan_latent_batch` create batches."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.attention.plan.gathers import GatherPlan, plan_gathers
from nanovllm_kernels.attention.plan.work_list import WorkList

# "flash" is "triton" plus FlashAttention for prompts. "cutedsl" is "triton" plus our CuTe DSL kernel for decodes.
# "fastest" is "triton" plus FlashAttention and the CuTe DSL kernel, where installed and where they support the shape.
Backend = Literal["torch", "triton", "flash", "cutedsl", "fastest"]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of a step, and a plan for each kernel that attends for some of them. An unused plan is None.

    block_tables, seq_lens, query_start_loc, max_query_len, max_seq_len: see `plan_batch`.
    work_element_bytes: element size for which the work lists were planned, see `tile_configs.tile_element_bytes`.
    reads_cache_in_place: whether `numba_gqa`, which gathers nothing, computes the step.
    gather_plan: for plain torch.
    narrow_work, wide_work: for Triton's narrow tiles (few queries per request) and wide tiles (many queries).
    cute_decode_lens: int32, at most [B], for the CuTe DSL kernel: tokens of requests with one query, 0 for others.
    cute_workspace: memory of the CuTe DSL kernel; empty without `cute_decode_lens`.
    flash_requests: requests for which FlashAttention attends.
    num_absorbed_tokens: int32 [1], for latent caches: number of tokens up to the last token outside whole prompts. A
        whole prompt has all of its tokens in the step.
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
        """Raise ValueError if the work lists were planned for another element size, hence for other tiles."""
        element_bytes = tile_configs.tile_element_bytes(q.element_size(), kv_cache.element_size())
        if element_bytes != self.work_element_bytes:
            raise ValueError(f"the batch was not planned for queries of {q.dtype}: pass dtype={q.dtype} to the plan")


class PagedRequests(NamedTuple):
    """Requests whose tokens are cached in pages. See `paged_attention` and `plan_batch`."""

    kv_cache: Tensor
    kv_scales: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
