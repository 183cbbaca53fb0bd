"""Attention over a paged key-value cache, for decodes, prefill chunks and any mix of them."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nanovllm_kernels.attention import flash_prefill, reference, tiles
from nanovllm_kernels.attention.rounds import SMALLEST_ROUNDS, AttentionRounds
from nanovllm_kernels.attention.work_list import Rule, WorkList, make_work_list, query_classes
from nanovllm_kernels.platform import describe_device, has_cute, has_flash_attention, runs_in_float32

__all__ = [
    "SMALLEST_ROUNDS",
    "AttentionBatch",
    "AttentionRounds",
    "Backend",
    "attention_rounds",
    "best_page_size",
    "paged_attention",
    "plan_batch",
    "whole_prompt_tokens",
]

SMALLEST_PAGE_SIZE = 16

# "triton": our Triton kernels. "flash" adds FlashAttention for prompts, "cutedsl" our CuTe DSL kernel for decodes.
# "fastest" uses whichever of both is installed and supports the shape.
Backend = Literal["torch", "triton", "flash", "cutedsl", "fastest"]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What attention needs of a step's batch, the same for every layer. Made by `plan_batch`.

    in_place: use the CPU kernel that reads a bf16 cache in place.
    gathers: gather plan of the plain torch path.
    narrow, wide: work lists of the Triton kernels, for requests with few queries and with many.
    number_size: element size in bytes for which the lists were planned, see `tiles.number_size`.
    decode_lens: int32 lengths of the requests with one query, 0 for others; for the CuTe DSL kernel.
    workspace: memory of the CuTe DSL kernel.
    flash: the requests that FlashAttention computes.
    num_absorbed: int32 [1], for latent caches: tokens up to the last one outside prompts that are whole in the step.
    Unused fields are None or empty. The other fields: as given to `plan_batch`.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    in_place: bool
    gathers: reference.Gathers | None
    narrow: WorkList | None
    wide: WorkList | None
    number_size: int
    decode_lens: Tensor | None
    workspace: tuple[Tensor, ...]
    flash: flash_prefill.FlashRequests | None
    num_absorbed: Tensor | None = None

    @property
    def reads_own_keys(self) -> bool:
        """Whether `paged_attention` reads the step's own keys and values in addition to the cache."""
        return self.flash is not None and self.flash.block_tables is None


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
    whole: bool = False,
) -> AttentionBatch:
    """Prepare a step's attention, once for all its layers.

    block_tables: int32 [B, max_blocks], each request's pages in order; entries past its length are valid page numbers
        that are not read.
    seq_lens: int32 [B], tokens of each request, including this step's.
    query_start_loc: int32 [B + 1], each request's first query. Query i of n of request b has position
        seq_lens[b] - n + i and sees the tokens up to itself.
    num_decodes: leading requests with exactly one query. None: unknown to the host (not for "torch"); launches then
        cover every case, so that a captured graph can be replayed for any lengths within the bounds.
    max_query_len, max_seq_len: bounds over the batch that shape the launch; need not be tight.
    num_heads: query heads. kv_cache: any layer's, for its shape and dtype.
    backend: "torch" runs everywhere, but waits for the device on CUDA. The others need CUDA ("triton": or its
        interpreter), never wait, and allow requests without a query. "flash" and "cutedsl" need the extras flash-attn
        and cutedsl. FlashAttention does not read FP8 caches.
    dtype: of the queries; None: the cache's.
    num_tokens: bound on the step's tokens, for smaller tables; None: B * max_query_len.
    whole: every request with several queries has all of its tokens in this step. FlashAttention then reads the step's
        own keys and values, see `AttentionBatch.reads_own_keys`.
    """
    batch = AttentionBatch(
        block_tables,
        seq_lens,
        query_start_loc,
        max_query_len,
        max_seq_len,
        in_place=False,
        gathers=None,
        narrow=None,
        wide=None,
        number_size=tiles.number_size((dtype or kv_cache.dtype).itemsize, kv_cache.element_size()),
        decode_lens=None,
        workspace=(),
        flash=None,
    )
    if backend == "torch":
        return _plan_torch(batch, kv_cache, num_decodes, dtype)
    return _plan_lists(
        _plan_cute(batch, kv_cache, num_heads, num_decodes, backend, dtype or kv_cache.dtype),
        kv_cache,
        num_heads,
        num_decodes,
        backend,
        len(seq_lens) * max_query_len if num_tokens is None else num_tokens,
        whole=whole,
    )


def _plan_torch(
    batch: AttentionBatch, kv_cache: Tensor, num_decodes: int | None, dtype: torch.dtype | None
) -> AttentionBatch:
    if num_decodes is None:
        raise ValueError('num_decodes is None, but the backend "torch" needs it')
    on_cpu = kv_cache.dtype == torch.bfloat16 and not kv_cache.is_cuda
    if on_cpu and runs_in_float32(int(batch.query_start_loc[-1])):
        return replace(batch, in_place=True)
    tables = (batch.block_tables, batch.seq_lens, batch.query_start_loc)
    return replace(batch, gathers=reference.plan_gathers(*tables, num_decodes, kv_cache.shape[1], dtype))


def _plan_cute(
    batch: AttentionBatch,
    kv_cache: Tensor,
    num_heads: int,
    num_decodes: int | None,
    backend: Backend,
    dtype: torch.dtype,
) -> AttentionBatch:
    """Return `batch` with single-query requests planned for the CuTe DSL kernel, if it supports the shape."""
    if num_decodes == 0 or backend not in ("cutedsl", "fastest") or not has_cute():
        return batch
    from nanovllm_kernels.attention import cute_decode

    _, page_size, num_cached, head_dim = kv_cache.shape
    num_kv_heads, device = num_cached // 2, kv_cache.device
    group = num_heads // num_kv_heads
    if not cute_decode.can_decode(head_dim, group, page_size, dtype, kv_cache.dtype, device):
        return batch
    narrow_q = tiles.tile_config(head_dim, batch.number_size, group, wide=False).block_m // group
    if num_decodes is None and 1 < batch.max_query_len <= narrow_q:
        # The step verifies draft tokens: one work list holds all requests.
        return batch
    decode_lens = _decode_lens(batch.seq_lens, batch.query_start_loc, num_decodes, batch.max_query_len)
    workspace = cute_decode.make_workspace(len(decode_lens), num_heads, num_kv_heads, head_dim, device)
    return replace(batch, decode_lens=decode_lens, workspace=workspace)


def _plan_lists(
    batch: AttentionBatch,
    kv_cache: Tensor,
    num_heads: int,
    num_decodes: int | None,
    backend: Backend,
    num_tokens: int,
    *,
    whole: bool,
) -> AttentionBatch:
    """Return `batch` with the requests that the CuTe DSL kernel does not take in work lists or for FlashAttention."""
    num_kv_heads, head_dim = kv_cache.shape[2] // 2, kv_cache.shape[3]
    group = num_heads // num_kv_heads
    narrow, wide = (tiles.tile_config(head_dim, batch.number_size, group, wide=kind) for kind in (False, True))
    least = 2 if num_decodes == 0 or batch.decode_lens is not None else 1
    block_q = (narrow.block_m // group, wide.block_m // group)
    classes = query_classes(*block_q, least, batch.max_query_len)
    rule, rest_lens = Rule(), None
    least_flash = flash_prefill.LEAST_CAPTURED if num_decodes is None else 2
    by_flash = bool(classes[1]) and batch.max_query_len >= least_flash and _has_flash(head_dim, kv_cache.dtype, backend)
    if by_flash and whole:
        batch = replace(batch, flash=flash_prefill.whole_requests(batch.query_start_loc))
        classes = query_classes(*block_q, least, 1)
    elif by_flash:
        rule = flash_prefill.list_rule(num_heads, describe_device(kv_cache.device).num_sms)
    lists: list[WorkList | None] = []
    for config, query_lens in zip((narrow, wide), classes, strict=True):
        if not query_lens:
            lists.append(None)
            continue
        work, rest_lens = make_work_list(
            batch.seq_lens,
            batch.query_start_loc,
            query_lens,
            rule,
            config,
            block_q=config.block_m // group,
            head_blocks=num_kv_heads,
            num_tokens=num_tokens,
        )
        # With few requests and less context than the rule asks for, no request with several queries is listed.
        needed = (
            query_lens.start == 1
            or len(batch.seq_lens) > rule.max_rest
            or batch.max_seq_len >= rule.min_context + query_lens.start
        )
        lists.append(work if needed else None)
    batch = replace(batch, narrow=lists[0], wide=lists[1])
    if rule == Rule() or rest_lens is None:
        return batch
    tables = (batch.seq_lens, batch.query_start_loc, batch.block_tables)
    return replace(batch, flash=flash_prefill.gather_requests(rest_lens, *tables, kv_cache.shape[1]))


def _has_flash(head_dim: int, cached: torch.dtype, backend: Backend) -> bool:
    supported = flash_prefill.supports(head_dim, cached)
    return backend in ("flash", "fastest") and has_flash_attention() and supported


def best_page_size(head_dim: int, cached: torch.dtype, backend: Backend) -> int:
    """Return the page size in tokens with which prompts attend fastest. cached: dtype of the cache."""
    copies = head_dim in flash_prefill.COPIED_HEAD_DIMS and _has_flash(head_dim, cached, backend)
    return flash_prefill.COPIED_PAGE_SIZE if copies else SMALLEST_PAGE_SIZE


def whole_prompt_tokens(kv_cache: Tensor, backend: Backend) -> int | None:
    """Return the number of tokens from which a captured step of whole prompts attends without the cache, or None.

    See `whole` of `plan_batch`. Latent caches return None.
    """
    is_latent = kv_cache.shape[2] == 1
    has_flash = not is_latent and _has_flash(kv_cache.shape[3], kv_cache.dtype, backend)
    return flash_prefill.LEAST_CAPTURED if has_flash else None


def attention_rounds(num_heads: int, num_kv_heads: int, device: torch.device) -> AttentionRounds:
    """Describe how prompts with these heads share the device's multiprocessors."""
    num_sms = describe_device(device).num_sms
    if num_sms < num_kv_heads:
        return SMALLEST_ROUNDS
    rule = flash_prefill.list_rule(num_heads, num_sms)
    tile_tokens = max(1, flash_prefill.TILE_ROWS * num_kv_heads // num_heads)
    return AttentionRounds(tile_tokens, num_sms // num_kv_heads, rule.full_query_len, rule.min_context)


def _decode_lens(seq_lens: Tensor, query_start_loc: Tensor, num_decodes: int | None, max_query_len: int) -> Tensor:
    if num_decodes is not None:
        return seq_lens[:num_decodes]
    if max_query_len == 1:
        return seq_lens
    return seq_lens * (query_start_loc.diff() == 1)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    own_keys_values: Tensor | None = None,
) -> Tensor:
    """Causal grouped-query attention (Ainslie et al. 2023) of a batch of requests over their pages.

    q: [T, Hq, D], request after request; heads contiguous, tokens with any stride; float32, float16 or bfloat16.
    kv_cache: [N, P, 2 Hkv, D], q's dtype or float8_e4m3fn, contiguous, Hq a multiple of Hkv. Each slot holds the key
        heads, then the value heads. This step's keys and values are already written.
    scale: factor for the products before the softmax.
    kv_scales: uint8 [N, 2 Hkv, P], contiguous, for a float8_e4m3fn cache (see `fp8`), else None.
    own_keys_values: [T, 2 Hkv, D], this step's, laid out as in the cache; heads contiguous, tokens with any stride.
        Required if `batch.reads_own_keys`, otherwise ignored.
    Returns: contiguous [T, Hq, D] in q's dtype.
    """
    if batch.in_place:
        return _paged_attention_on_cpu(q, kv_cache, batch, scale)
    if batch.gathers is not None:
        return reference.paged_attention(q, kv_cache, kv_scales, batch.gathers, scale)
    check_number_size(q, kv_cache, batch)
    return _paged_attention_op(
        q,
        kv_cache,
        kv_scales,
        own_keys_values if batch.reads_own_keys else None,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        [tensor for tensor in batch.flash or () if tensor is not None],
        batch.decode_lens,
        list(batch.workspace),
        list(batch.narrow or ()),
        list(batch.wide or ()),
        scale,
        batch.max_query_len,
    )


def check_number_size(q: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> None:
    """Raise ValueError if `batch` was planned for another element size: tiles would not match its lists."""
    if tiles.number_size(q.element_size(), kv_cache.element_size()) != batch.number_size:
        raise ValueError(f"the batch was not planned for queries of {q.dtype}: pass dtype={q.dtype} to the plan")


def _paged_attention_on_cpu(q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    from nanovllm_kernels.attention import numba_paged

    queries = q.float()
    if queries.stride(1) != q.shape[2] or queries.stride(2) != 1:
        queries = queries.contiguous()
    out = torch.empty(q.shape)
    numba_paged.paged_attention(
        queries, kv_cache, batch.block_tables, batch.seq_lens, batch.query_start_loc, scale, out
    )
    return out.to(q.dtype)


@torch.library.custom_op("nanovllm::paged_attention", mutates_args=("workspace",))
def _paged_attention_op(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    own_keys_values: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    flash: list[Tensor],
    decode_lens: Tensor | None,
    workspace: list[Tensor],
    narrow: list[Tensor],
    wide: list[Tensor],
    scale: float,
    max_query_len: int,
) -> Tensor:
    from nanovllm_kernels.attention import triton_gqa

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tables = (block_tables, seq_lens, query_start_loc)
    if decode_lens is not None:
        from nanovllm_kernels.attention import cute_decode

        # Token b is request b's query. Requests with several queries get zeros here, and their results below.
        count = min(len(decode_lens), len(q))
        memory = cute_decode.Workspace(*workspace)
        cute_decode.paged_decode(q, kv_cache, kv_scales, block_tables[:count], decode_lens[:count], scale, memory, out)
    for work, is_wide in ((narrow, False), (wide, True)):
        if work:
            triton_gqa.paged_attention(q, kv_cache, kv_scales, *tables, WorkList(*work), scale, out, wide=is_wide)
    if flash and own_keys_values is not None:
        keys, values = own_keys_values.chunk(2, 1)
        flash_prefill.plain_prefill(q, keys, values, flash_prefill.FlashRequests(*flash), scale, max_query_len, out)
    elif flash:
        flash_prefill.paged_prefill(q, kv_cache, flash_prefill.FlashRequests(*flash), scale, max_query_len, out)
    return out


_paged_attention_op.register_fake(lambda q, *_: q.new_empty(q.shape))
