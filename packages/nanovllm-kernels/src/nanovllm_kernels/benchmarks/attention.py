"""Benchmark cases of paged attention, for decodes and for prompts: grouped-query and latent (MLA) attention.

The cost of a case is bytes of the cache for most decodes. For prompts, and for latent decodes with many heads, the cost
is operations.
"""

from collections.abc import Callable, Iterator

import torch

from nanovllm_kernels import fp8
from nanovllm_kernels.attention import Backend, paged_attention, plan_batch
from nanovllm_kernels.attention.mla import latent_attention, plan_latent_batch
from nanovllm_kernels.benchmarks.inputs import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, random
from nanovllm_kernels.benchmarks.timing import COLD_BYTES, BenchmarkCase
from nanovllm_kernels.platform import has_cute, has_flash_attention

# Sizes in DeepSeek-V3, in elements. KEY_DIM, ROPE_DIM: the unrotated and the rotated part of a head's key.
# VALUE_DIM: a head's value. LATENT_DIM: the cached vector from which the keys and values of all heads are expanded.
KEY_DIM, ROPE_DIM, VALUE_DIM, LATENT_DIM = 128, 64, 128, 512


def random_fp8(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random e4m3 values of magnitude below 2."""
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8).bitwise_and_(0xBF).view(fp8.DTYPE)


def make_decode_inputs(batch: int, context: int, page_size: int, *, is_fp8: bool) -> tuple[torch.Tensor | None, ...]:
    """Return (queries, cache, scales or None, block tables, seq_lens): one query and `context` tokens per request."""
    pages_per_request = context // page_size
    num_pages = batch * pages_per_request + 1
    shape = (num_pages, page_size, 2 * NUM_KV_HEADS, HEAD_DIM)
    kv_cache = random_fp8(shape) if is_fp8 else random(*shape)
    kv_scales = fp8.make_scales(kv_cache) if is_fp8 else None
    tables = (torch.randperm(num_pages - 1, device="cuda") + 1).view(batch, pages_per_request).int()
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return random(batch, NUM_HEADS, HEAD_DIM), kv_cache, kv_scales, tables, seq_lens


def decode_case(
    name: str,
    make_call: Callable[[], Callable[[], object]],
    batch: int,
    context: int,
    page_size: int,
    *,
    is_fp8: bool,
) -> BenchmarkCase:
    """Make a case of decode attention. `make_call` creates inputs and returns the call to measure."""
    cache_bytes = 2 * batch * context * NUM_KV_HEADS * (HEAD_DIM + fp8.SCALE_BYTES if is_fp8 else HEAD_DIM * 2)
    prefix = "FP8 " if is_fp8 else ""
    return BenchmarkCase(
        f"{prefix}{name} batch {batch} context {context} page {page_size}", make_call, cache_bytes, "TB/s", cache_bytes
    )


def triton_decode_case(batch: int, context: int, page_size: int, *, is_fp8: bool = False) -> BenchmarkCase:
    """Make a case of decode attention by the Triton kernel."""

    def make_call() -> Callable[[], object]:
        q, kv_cache, kv_scales, tables, seq_lens = make_decode_inputs(batch, context, page_size, is_fp8=is_fp8)
        query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        batch_plan = plan_batch(
            tables,
            seq_lens,
            query_start_loc,
            num_decodes=batch,
            max_query_len=1,
            max_seq_len=context,
            num_heads=NUM_HEADS,
            kv_cache=kv_cache,
            backend="triton",
            dtype=DTYPE,
        )
        return lambda: paged_attention(q, kv_cache, batch_plan, scale=HEAD_DIM**-0.5, kv_scales=kv_scales)

    return decode_case("decode", make_call, batch, context, page_size, is_fp8=is_fp8)


def cute_decode_case(batch: int, context: int, page_size: int, *, is_fp8: bool = False) -> BenchmarkCase:
    """Make a case of decode attention by the CuTe DSL kernel."""
    from nanovllm_kernels.attention.gqa.cute_decode import allocate_workspace, paged_decode

    def make_call() -> Callable[[], object]:
        q, kv_cache, kv_scales, tables, seq_lens = make_decode_inputs(batch, context, page_size, is_fp8=is_fp8)
        out, workspace = torch.empty_like(q), allocate_workspace(batch, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, q.device)
        return lambda: paged_decode(q, kv_cache, kv_scales, tables, seq_lens, HEAD_DIM**-0.5, workspace, out)

    return decode_case("CuTe decode", make_call, batch, context, page_size, is_fp8=is_fp8)


def flash_decode_case(batch: int, context: int, page_size: int) -> BenchmarkCase:
    """Make a case of decode attention by FlashAttention, which the engine uses for prompts only."""
    from nanovllm_kernels.attention.gqa.flash_prefill import attend_to_pages
    from nanovllm_kernels.attention.plan.flash_requests import FlashRequests

    def make_call() -> Callable[[], object]:
        q, kv_cache, _, tables, seq_lens = make_decode_inputs(batch, context, page_size, is_fp8=False)
        query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        requests, out = FlashRequests(query_start_loc, query_start_loc.diff(), seq_lens, tables), torch.empty_like(q)
        return lambda: attend_to_pages(q, kv_cache, requests, HEAD_DIM**-0.5, 1, out)

    return decode_case("flash decode", make_call, batch, context, page_size, is_fp8=False)


def latent_attention_case(
    name: str,
    batch: int,
    query_len: int,
    context: int,
    num_heads: int,
    cost: float,
    unit: str,
    *,
    is_fp8: bool = False,
    backend: Backend = "triton",
) -> BenchmarkCase:
    """Make a case of latent attention and its projections. Each request's queries are its last `query_len` tokens."""
    page_size, cache_dim = 64, LATENT_DIM + ROPE_DIM

    def make_call() -> Callable[[], object]:
        num_pages = batch * context // page_size
        shape = (num_pages, page_size, 1, cache_dim)
        kv_cache = random_fp8(shape) if is_fp8 else random(*shape)
        kv_scales = fp8.make_scales(kv_cache) if is_fp8 else None
        tables = torch.randperm(num_pages, device="cuda").view(batch, -1).int()
        batch_plan = plan_latent_batch(
            tables,
            torch.full((batch,), context, dtype=torch.int32, device="cuda"),
            torch.arange(batch + 1, dtype=torch.int32, device="cuda") * query_len,
            num_decodes=batch if query_len == 1 else 0,
            max_query_len=query_len,
            max_seq_len=context,
            num_heads=num_heads,
            kv_cache=kv_cache,
            backend=backend,
            dtype=DTYPE,
        )
        q = random(batch * query_len, num_heads, KEY_DIM + ROPE_DIM)
        expansion = random(num_heads, KEY_DIM + VALUE_DIM, LATENT_DIM)  # Expands a latent to keys and values.
        scale = (KEY_DIM + ROPE_DIM) ** -0.5
        return lambda: latent_attention(q, expansion, kv_cache, batch_plan, scale=scale, kv_scales=kv_scales)

    prefix = "FP8 " if is_fp8 else ""
    input_bytes = batch * context * cache_dim * (1 if is_fp8 else 2)
    return BenchmarkCase(f"{prefix}{name} {num_heads} heads {batch} x {context}", make_call, cost, unit, input_bytes)


def latent_decode_case(batch: int, context: int, num_heads: int, *, is_fp8: bool = False) -> BenchmarkCase:
    """Make a case of decodes over latents. The cost is bytes of inputs for up to 16 heads, and operations for more."""
    expansion_elements = num_heads * (KEY_DIM + VALUE_DIM) * LATENT_DIM
    if num_heads <= 16:
        cost, unit = batch * context * (LATENT_DIM + ROPE_DIM) * (1 if is_fp8 else 2) + 2 * expansion_elements, "TB/s"
    else:
        cost = 2 * batch * (num_heads * context * (2 * LATENT_DIM + ROPE_DIM) + expansion_elements)
        unit = "TFLOP/s"
    return latent_attention_case("MLA decode", batch, 1, context, num_heads, cost, unit, is_fp8=is_fp8)


def latent_prefill_case(batch: int, length: int, num_heads: int, backend: Backend = "triton") -> BenchmarkCase:
    """Make a case of latent attention for whole prompts. The cost is operations on the expanded keys and values."""
    pairs_per_prompt = length * (length + 1) / 2  # (query, visible key) pairs.
    cost = 2 * batch * num_heads * pairs_per_prompt * (KEY_DIM + ROPE_DIM + VALUE_DIM)
    name = _name_with_backend("MLA prefill", backend)
    return latent_attention_case(name, batch, length, length, num_heads, cost, "TFLOP/s", backend=backend)


def latent_chunk_case(length: int, context: int, num_heads: int) -> BenchmarkCase:
    """Make a case of a prompt's last `length` tokens. The cost is the operations of attention on latents."""
    query_key_pairs = length * (context - length) + length * (length + 1) / 2
    cost = 2 * num_heads * (query_key_pairs * (2 * LATENT_DIM + ROPE_DIM) + length * (KEY_DIM + VALUE_DIM) * LATENT_DIM)
    return latent_attention_case(f"MLA chunk of {length}", 1, length, context, num_heads, cost, "TFLOP/s")


def latent_cases() -> Iterator[BenchmarkCase]:
    """Yield cases of latent attention with all heads of DeepSeek-V3, and with an eighth of the heads."""
    for num_heads in (16, 128):
        for batch, context in ((1, 8192), (64, 2048), (64, 8192), (256, 2048)):
            for is_fp8 in (False, True):
                yield latent_decode_case(batch, context, num_heads, is_fp8=is_fp8)
        yield from (latent_chunk_case(length, context, num_heads) for length, context in ((100, 8192), (2048, 32768)))
        yield from (latent_prefill_case(4, 2048, num_heads, backend) for backend in prefill_backends())


def prefill_backends() -> tuple[Backend, ...]:
    """Return the backends that have prompt kernels on this machine."""
    return ("triton", "flash") if has_flash_attention() else ("triton",)


def _name_with_backend(name: str, backend: Backend) -> str:
    return name if backend == "triton" else f"{backend} {name}"


def prefill_case(batch: int, length: int, backend: Backend = "triton") -> BenchmarkCase:
    """Make a case of whole prompts with causal attention."""
    page_size = 16
    pages_per_prompt = length // page_size

    def make_call() -> Callable[[], object]:
        kv_cache = random(batch * pages_per_prompt, page_size, 2 * NUM_KV_HEADS, HEAD_DIM)
        tables = torch.randperm(batch * pages_per_prompt, device="cuda").view(batch, pages_per_prompt).int()
        q = random(batch * length, NUM_HEADS, HEAD_DIM)
        seq_lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
        batch_plan = plan_batch(
            tables,
            seq_lens,
            query_start_loc,
            num_decodes=0,
            max_query_len=length,
            max_seq_len=length,
            num_heads=NUM_HEADS,
            kv_cache=kv_cache,
            backend=backend,
        )
        return lambda: paged_attention(q, kv_cache, batch_plan, scale=HEAD_DIM**-0.5)

    operations = 4 * batch * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2
    return BenchmarkCase(
        f"{_name_with_backend('prefill', backend)} {batch} x {length}", make_call, operations, "TFLOP/s", COLD_BYTES
    )


def paged_cases() -> Iterator[BenchmarkCase]:
    """Yield cases of grouped-query attention: decodes and whole prompts, with every backend that this machine has."""
    for page_size in (16, 64):
        for batch in (1, 8, 64, 256):
            for context in (512, 2048, 8192, 32768):
                for is_fp8 in (False, True):
                    yield triton_decode_case(batch, context, page_size, is_fp8=is_fp8)
                    if has_cute():
                        yield cute_decode_case(batch, context, page_size, is_fp8=is_fp8)
                if has_flash_attention():
                    yield flash_decode_case(batch, context, page_size)
    for backend in prefill_backends():
        yield prefill_case(4, 2048, backend)
        yield prefill_case(1, 8192, backend)
