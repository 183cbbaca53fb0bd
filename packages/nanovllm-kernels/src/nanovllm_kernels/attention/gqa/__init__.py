"""Grouped-query attention over a paged cache: plans the batch of a step, and chooses kernels."""

from dataclasses import replace

import torch
from torch import Tensor

from nanovllm_kernels.attention.gqa import flash_prefill, gqa_reference
from nanovllm_kernels.attention.plan import flash_requests, tile_configs
from nanovllm_kernels.attention.plan.attention_batch import AttentionBatch, Backend, PagedRequests
from nanovllm_kernels.attention.plan.attention_estimator import PROPORTIONAL_ESTIMATOR, AttentionEstimator
from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.attention.plan.work_list import WorkList, WorkListFilter, make_work_list, split_query_lens
from nanovllm_kernels.platform import computes_rows_in_float32, describe_device, has_cute, has_flash_attention

__all__ = [
    "best_page_size",
    "make_attention_estimator",
    "min_tokens_of_whole_prompt_graphs",
    "paged_attention",
    "plan_batch",
]

# Page size, in tokens, that is used unless larger pages make attention faster.
DEFAULT_PAGE_SIZE = 16
# The CuTe DSL kernel may compute all requests of a step if no request has more queries.
MAX_TILED_QUERIES = 16


def plan_batch(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    num_decodes: int | None,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    kv_cache: Tensor,
    backend: Backend,
    dtype: torch.dtype | None = None,
    num_tokens: int | None = None,
    has_only_whole_prompts: bool = False,
) -> AttentionBatch:
    """Plan the attention of a step, once for all layers.

    block_tables: int32 [B, max_blocks], page numbers of each request, in order. Entries past a request's last page must
        be valid page numbers, but these pages are not read.
    seq_lens: int32 [B], number of tokens of each request, including this step's tokens.
    query_start_loc: int32 [B + 1], index of each request's first query in the step, then the number of queries. A
        request may have no query. If request b has n queries, query i of request b has position seq_lens[b] - n + i,
        and sees the tokens up to this position.
    num_decodes: number of requests with exactly one query. These requests come first. None: the host does not know this
        number. A captured graph can then be replayed for any lengths within the bounds. The backend "torch" does not
        allow None.
    max_query_len: upper bound on the queries of a request.
    max_seq_len: upper bound on the tokens of a request.
    num_heads: number of query heads.
    kv_cache: the cache of any layer; only shape, dtype and device matter.
    backend: "torch" runs everywhere, but waits for the device on CUDA. Other backends need CUDA (or Triton's
        interpreter), and never wait. "flash" needs the package's extra flash-attn, and does not read FP8 caches.
        "cutedsl" needs the package's extra cutedsl.
    dtype: dtype of the queries. None: dtype of the cache.
    num_tokens: upper bound on the tokens of the step. None: B * max_query_len.
    has_only_whole_prompts: whether every request with several queries has all of its tokens in this step. If so,
        FlashAttention reads the step's own keys and values instead of the cache.
    """
    query_dtype = dtype or kv_cache.dtype
    # `tile_configs` selects tile sizes by this element size.
    work_element_bytes = tile_configs.tile_element_bytes(query_dtype.itemsize, kv_cache.element_size())
    request_tensors = (block_tables, seq_lens, query_start_loc)
    batch = AttentionBatch(*request_tensors, max_query_len, max_seq_len, work_element_bytes)
    if backend == "torch":
        is_bf16_on_cpu = kv_cache.dtype == torch.bfloat16 and not kv_cache.is_cuda
        if num_decodes is not None and is_bf16_on_cpu and computes_rows_in_float32(int(query_start_loc[-1])):
            return replace(batch, uses_numba_gqa=True)
        return batch.with_gathers(num_decodes, kv_cache.shape[1], dtype)  # For `gqa_reference`.
    if not has_only_whole_prompts:
        batch = _plan_cute_decodes(batch, kv_cache, num_heads, num_decodes, backend, query_dtype)
    return _plan_work_lists(
        batch,
        kv_cache,
        num_heads,
        num_decodes,
        backend,
        len(seq_lens) * max_query_len if num_tokens is None else num_tokens,
        has_only_whole_prompts=has_only_whole_prompts,
    )


def _plan_cute_decodes(
    batch: AttentionBatch,
    kv_cache: Tensor,
    num_heads: int,
    num_decodes: int | None,
    backend: Backend,
    dtype: torch.dtype,
) -> AttentionBatch:
    """Plan the requests of the CuTe DSL kernel, if the kernel supports the sizes and dtypes.

    With few queries per request (decodes with drafts), the kernel computes all requests; else those with one query.
    """
    has_few_queries = 1 < batch.max_query_len <= MAX_TILED_QUERIES
    if (num_decodes == 0 and not has_few_queries) or backend not in ("cutedsl", "fastest") or not has_cute():
        return batch
    from nanovllm_kernels.attention.gqa import cute_decode

    page_size, head_dim, device = kv_cache.shape[1], kv_cache.shape[3], kv_cache.device
    num_kv_heads = kv_cache.shape[2] // 2
    group_size = num_heads // num_kv_heads  # Query heads per key-value head.
    if not cute_decode.supports_decode(head_dim, group_size, page_size, dtype, kv_cache.dtype, device):
        return batch
    sizes = (num_heads, num_kv_heads, head_dim, device)
    if has_few_queries:
        tile_queries = cute_decode.max_tile_queries(group_size, kv_cache.dtype)
        tiles = cute_decode.plan_tiles(batch.seq_lens, batch.query_start_loc, batch.max_query_len, tile_queries)
        workspace = cute_decode.allocate_workspace(len(tiles.visible_lens), *sizes, tile_queries=tile_queries)
        return replace(batch, cute_seq_lens=tiles.visible_lens, cute_tiles=tiles.queries, cute_workspace=workspace)
    decode_lens = _find_decode_lens(batch.seq_lens, batch.query_start_loc, num_decodes, batch.max_query_len)
    return replace(
        batch, cute_seq_lens=decode_lens, cute_workspace=cute_decode.allocate_workspace(len(decode_lens), *sizes)
    )


def _find_decode_lens(seq_lens: Tensor, query_start_loc: Tensor, num_decodes: int | None, max_query_len: int) -> Tensor:
    """Return the number of tokens of each request with one query, and 0 for other requests."""
    if num_decodes is not None:
        return seq_lens[:num_decodes]
    if max_query_len == 1:
        return seq_lens
    return seq_lens * (query_start_loc.diff() == 1)


def _plan_work_lists(
    batch: AttentionBatch,
    kv_cache: Tensor,
    num_heads: int,
    num_decodes: int | None,
    backend: Backend,
    num_tokens: int,
    *,
    has_only_whole_prompts: bool,
) -> AttentionBatch:
    """Plan work lists (for Triton) and FlashAttention for the requests that CuTe DSL leaves out."""
    if batch.cute_tiles is not None:
        return batch
    num_kv_heads, head_dim = kv_cache.shape[2] // 2, kv_cache.shape[3]
    group_size = num_heads // num_kv_heads
    # First narrow tiles (for few queries), then wide tiles. A tile has `block_m` rows: one per query and query head.
    configs = [
        tile_configs.gqa_tile_config(head_dim, batch.work_element_bytes, group_size, many_queries=many_queries)
        for many_queries in (False, True)
    ]
    queries_per_tile = [config.block_m // group_size for config in configs]
    min_query_len = 2 if num_decodes == 0 or batch.cute_seq_lens is not None else 1
    query_len_ranges = split_query_lens(*queries_per_tile, min_query_len, batch.max_query_len)
    # The default filter leaves no requests to FlashAttention.
    request_filter, excluded_query_lens = WorkListFilter(), None
    min_flash_queries = flash_prefill.MIN_QUERY_LEN_OF_CAPTURED_STEPS if num_decodes is None else 2
    uses_flash = (
        bool(query_len_ranges[1])
        and batch.max_query_len >= min_flash_queries
        and _supports_flash(head_dim, kv_cache.dtype, backend)
    )
    if uses_flash and has_only_whole_prompts:
        batch = replace(batch, flash_requests=flash_requests.select_whole_prompts(batch.query_start_loc))
        query_len_ranges = split_query_lens(*queries_per_tile, min_query_len, 1)
    elif uses_flash:
        request_filter = flash_requests.work_list_filter(num_heads, describe_device(kv_cache.device).num_sms)
    work_lists: list[WorkList | None] = []
    for config, block_q, query_lens in zip(configs, queries_per_tile, query_len_ranges, strict=True):
        if not query_lens:
            work_lists.append(None)
            continue
        work, excluded_query_lens = make_work_list(
            batch.seq_lens,
            batch.query_start_loc,
            query_lens,
            request_filter,
            config,
            block_q=block_q,
            num_head_blocks=num_kv_heads,
            num_tokens=num_tokens,
        )
        # The list has no work if FlashAttention takes all of its requests.
        may_have_work = (
            query_lens.start == 1
            or len(batch.seq_lens) > request_filter.max_excluded
            or batch.max_seq_len >= request_filter.min_context + query_lens.start
        )
        work_lists.append(work if may_have_work else None)
    batch = replace(batch, narrow_work=work_lists[0], wide_work=work_lists[1])
    if request_filter == WorkListFilter() or excluded_query_lens is None:
        return batch  # The work lists exclude no requests.
    request_tensors = (batch.seq_lens, batch.query_start_loc, batch.block_tables)
    requests = flash_requests.gather_flash_requests(excluded_query_lens, *request_tensors, kv_cache.shape[1])
    return replace(batch, flash_requests=requests)


def _supports_flash(head_dim: int, cache_dtype: torch.dtype, backend: Backend) -> bool:
    supports_shape = flash_prefill.supports_pages(head_dim, cache_dtype)
    return backend in ("flash", "fastest") and has_flash_attention() and supports_shape


def best_page_size(head_dim: int, cache_dtype: torch.dtype, backend: Backend) -> int:
    """Return the page size, in tokens, with which attention of prompts is fastest."""
    uses_tma = head_dim in flash_prefill.TMA_HEAD_DIMS and _supports_flash(head_dim, cache_dtype, backend)
    return flash_prefill.TMA_PAGE_SIZE if uses_tma else DEFAULT_PAGE_SIZE


def min_tokens_of_whole_prompt_graphs(kv_cache: Tensor, backend: Backend) -> int | None:
    """Return the minimum size, in tokens, of CUDA graphs in which whole prompts read the step's keys, not the cache.

    A whole prompt has all of its tokens in the step. None: whole prompts always read the cache.
    """
    is_latent = kv_cache.shape[2] == 1  # MLA's cache has one latent vector per token.
    uses_flash = not is_latent and _supports_flash(kv_cache.shape[3], kv_cache.dtype, backend)
    return flash_prefill.MIN_QUERY_LEN_OF_CAPTURED_STEPS if uses_flash else None


def make_attention_estimator(num_heads: int, num_kv_heads: int, device: torch.device) -> AttentionEstimator:
    """Return an estimator of the time that the attention of prompts takes on `device`."""
    num_sms = describe_device(device).num_sms
    if num_sms < num_kv_heads:
        return PROPORTIONAL_ESTIMATOR  # On CPUs and in the interpreter, `num_sms` is 0.
    request_filter = flash_requests.work_list_filter(num_heads, num_sms)
    tile_tokens = max(1, flash_requests.FLASH_TILE_ROWS * num_kv_heads // num_heads)
    return AttentionEstimator(
        tile_tokens, num_sms // num_kv_heads, request_filter.query_limit, request_filter.min_context
    )


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    step_keys_values: Tensor | None = None,
) -> Tensor:
    """Compute causal grouped-query attention (Ainslie et al. 2023) of a batch of requests over their pages.

    q: [T, Hq, D], request after request; heads contiguous, tokens with any stride; float32, float16 or bfloat16.
    kv_cache: [pages, slots per page, 2 Hkv, D], q's dtype or float8_e4m3fn, contiguous, Hq a multiple of Hkv. Each slot
        holds a token's key heads, then the value heads. This step's keys and values are already written.
    batch: from `plan_batch`.
    scale: factor of the query-key products.
    kv_scales: uint8 [pages, 2 Hkv, slots per page], contiguous, for a float8_e4m3fn cache (see `fp8`), else None.
    step_keys_values: [T, 2 Hkv, D], the step's key heads, then value heads; heads contiguous, tokens with any stride.
        Required if `batch.reads_step_keys`, otherwise ignored.
    Returns: contiguous [T, Hq, D] in q's dtype.
    """
    if batch.uses_numba_gqa:
        return _attend_with_numba(q, kv_cache, batch, scale)
    if batch.torch_plan is not None:
        return gqa_reference.paged_attention(q, kv_cache, kv_scales, batch.torch_plan, scale)
    batch.check_element_size(q, kv_cache)
    return _paged_attention_op(
        q,
        kv_cache,
        kv_scales,
        step_keys_values if batch.reads_step_keys else None,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        [tensor for tensor in batch.flash_requests or () if tensor is not None],
        batch.cute_seq_lens,
        batch.cute_tiles,
        list(batch.cute_workspace),
        list(batch.narrow_work or ()),
        list(batch.wide_work or ()),
        scale,
        batch.max_query_len,
    )


def _attend_with_numba(q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    from nanovllm_kernels.attention.gqa import numba_gqa

    queries = q.float()
    if queries.stride(1) != q.shape[2] or queries.stride(2) != 1:
        queries = queries.contiguous()
    out = torch.empty(q.shape)
    numba_gqa.paged_attention(queries, kv_cache, batch.block_tables, batch.seq_lens, batch.query_start_loc, scale, out)
    return out.to(q.dtype)


@torch.library.custom_op("nanovllm::paged_attention", mutates_args=("cute_workspace",))
def _paged_attention_op(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    step_keys_values: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    flash_tensors: list[Tensor],
    cute_seq_lens: Tensor | None,
    cute_tiles: Tensor | None,
    cute_workspace: list[Tensor],
    narrow_work: list[Tensor],
    wide_work: list[Tensor],
    scale: float,
    max_query_len: int,
) -> Tensor:
    """Run each kernel that the step uses. Each list holds the tensors of one kernel's plan, or is empty."""
    from nanovllm_kernels.attention.gqa import triton_gqa

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    requests = PagedRequests(kv_cache, kv_scales, block_tables, seq_lens, query_start_loc)
    if cute_seq_lens is not None:
        from nanovllm_kernels.attention.gqa import cute_decode

        if cute_tiles is None:
            # Requests with one query come first, so token b is the query of request b. For other requests the length
            # is 0, and this kernel writes zeros. Kernels below overwrite these zeros.
            num_reqs = min(len(cute_seq_lens), len(q))
            block_tables, cute_seq_lens = block_tables[:num_reqs], cute_seq_lens[:num_reqs]
        workspace = cute_decode.DecodeWorkspace(*cute_workspace)
        cute_decode.paged_decode(
            q, kv_cache, kv_scales, block_tables, cute_seq_lens, scale, workspace, out, tiles=cute_tiles
        )
    for work, many_queries in ((narrow_work, False), (wide_work, True)):
        if work:
            triton_gqa.attend_to_pages(q, requests, WorkList(*work), scale, out, many_queries=many_queries)
    if flash_tensors and step_keys_values is not None:
        keys, values = step_keys_values.chunk(2, 1)
        flash_prefill.attend_to_step_tokens(q, keys, values, FlashRequests(*flash_tensors), scale, max_query_len, out)
    elif flash_tensors:
        flash_prefill.attend_to_pages(q, kv_cache, FlashRequests(*flash_tensors), scale, max_query_len, out)
    return out


_paged_attention_op.register_fake(lambda q, *_: q.new_empty(q.shape))
