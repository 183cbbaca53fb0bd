"""Benchmark cases of attention in steps captured as CUDA graphs. The host knows only upper bounds on the lengths.

The cost of an attention case is operations, or bytes of cached tokens if the case's name contains "by bytes".
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from nanovllm_kernels.attention import Backend, paged_attention, plan_batch
from nanovllm_kernels.attention.gqa import flash_prefill
from nanovllm_kernels.attention.gqa.flash_prefill import TMA_PAGE_SIZE
from nanovllm_kernels.attention.mla import latent_attention, plan_latent_batch
from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.attention.plan.work_list import WorkListFilter, make_work_list
from nanovllm_kernels.benchmarks.attention import KEY_DIM, LATENT_DIM, ROPE_DIM, VALUE_DIM
from nanovllm_kernels.benchmarks.inputs import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, random
from nanovllm_kernels.benchmarks.timing import COLD_BYTES, BenchmarkCase
from nanovllm_kernels.platform import has_cute, has_flash_attention

# Maximum number of tokens of a request. Determines the width of block tables.
MAX_SEQ_LEN = 131_072
PAGE_SIZE = TMA_PAGE_SIZE  # Tokens per page. The GPU's bulk copy engine (TMA) copies pages of this size.
# Numbers of query heads and of key-value heads in Qwen3-0.6B.
SMALL_MODEL_HEADS = (16, 8)
# A request's number of queries, and its number of tokens including the queries.
RequestLengths = tuple[int, int]


def make_step_tables(
    requests: Sequence[RequestLengths], num_table_rows: int, page_size: int
) -> tuple[torch.Tensor, ...]:
    """Return (block tables, seq_lens, query_start_loc) with `num_table_rows` rows: the requests, then empty rows."""
    page_counts = [-(-seq_len // page_size) for _, seq_len in requests]
    page_numbers = torch.randperm(max(1, sum(page_counts)), device="cuda").int()
    tables = torch.zeros((num_table_rows, MAX_SEQ_LEN // page_size), dtype=torch.int32, device="cuda")
    for row, num_pages in enumerate(page_counts):
        tables[row, :num_pages] = page_numbers[sum(page_counts[:row]) :][:num_pages]
    seq_lens = torch.zeros(num_table_rows, dtype=torch.int32)
    seq_lens[: len(requests)] = torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32)
    query_lens = torch.zeros(num_table_rows + 1, dtype=torch.int32)
    query_lens[1 : len(requests) + 1] = torch.tensor([query_len for query_len, _ in requests], dtype=torch.int32)
    return tables, seq_lens.cuda(), query_lens.cumsum(0, dtype=torch.int32).cuda()


def count_pairs(requests: Sequence[RequestLengths]) -> float:
    """Return the number of (query, visible key) pairs."""
    return sum(query_len * (seq_len - query_len) + query_len * (query_len + 1) / 2 for query_len, seq_len in requests)


def captured_attention_case(
    name: str,
    requests: Sequence[RequestLengths],
    *,
    num_table_rows: int,
    num_tokens: int,
    max_query_len: int | None = None,  # Bound on queries per request. None: `num_tokens`.
    heads: tuple[int, int] = (NUM_HEADS, NUM_KV_HEADS),
    backend: Backend | None,  # None: FlashAttention without our kernels.
    counts_bytes: bool = False,
    has_only_whole_prompts: bool = False,
) -> BenchmarkCase:
    """Make a case of attention for `requests`, in a step of `num_tokens` tokens.

    num_table_rows: number of rows of the block tables, including unused rows.
    heads: numbers of query heads and of key-value heads.
    counts_bytes: whether the cost is bytes instead of operations.
    has_only_whole_prompts: whether requests with several queries have no tokens from earlier steps.
    """
    num_heads, num_kv_heads = heads
    num_pages = max(1, sum(-(-seq_len // PAGE_SIZE) for _, seq_len in requests))
    query_len_bound = num_tokens if max_query_len is None else max_query_len

    def make_call() -> Callable[[], object]:
        kv_cache = random(num_pages, PAGE_SIZE, 2 * num_kv_heads, HEAD_DIM)
        request_tensors = make_step_tables(requests, num_table_rows, PAGE_SIZE)
        qkv, scale = random(num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM), HEAD_DIM**-0.5
        q, step_keys_values = qkv.split_with_sizes((num_heads, 2 * num_kv_heads), 1)
        if backend is None:
            block_tables, seq_lens, query_start_loc = request_tensors
            flash_requests = FlashRequests(query_start_loc, query_start_loc.diff(), seq_lens, block_tables)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            return lambda: flash_prefill.attend_to_pages(q, kv_cache, flash_requests, scale, query_len_bound, out)
        batch_plan = plan_batch(
            *request_tensors,
            num_decodes=None,
            max_query_len=query_len_bound,
            max_seq_len=MAX_SEQ_LEN,
            num_heads=num_heads,
            kv_cache=kv_cache,
            backend=backend,
            num_tokens=num_tokens,
            has_only_whole_prompts=has_only_whole_prompts,
        )
        return lambda: paged_attention(q, kv_cache, batch_plan, scale=scale, step_keys_values=step_keys_values)

    cached_bytes = sum(seq_len for _, seq_len in requests) * 2 * num_kv_heads * HEAD_DIM * 2
    operations = 4 * num_heads * HEAD_DIM * count_pairs(requests)
    cost, unit = (cached_bytes, "TB/s") if counts_bytes else (operations, "TFLOP/s")
    suffix = " by bytes" if counts_bytes else " whole" if has_only_whole_prompts else ""
    name = f"captured {name} {backend or 'flash alone'}{suffix}"
    return BenchmarkCase(name, make_call, cost, unit, max(cached_bytes, COLD_BYTES // 8))


def captured_latent_chunk_case(length: int, context: int, num_heads: int) -> BenchmarkCase:
    """Make a case of latent attention for the last `length` of `context` tokens, in a step padded to 512 tokens."""
    page_size, num_tokens, cache_dim = 64, 512, LATENT_DIM + ROPE_DIM

    def make_call() -> Callable[[], object]:
        kv_cache = random(context // page_size, page_size, 1, cache_dim)
        batch_plan = plan_latent_batch(
            *make_step_tables([(length, context)], 256, page_size),
            num_decodes=None,
            max_query_len=num_tokens,
            max_seq_len=MAX_SEQ_LEN,
            num_heads=num_heads,
            kv_cache=kv_cache,
            backend="triton",
            num_tokens=num_tokens,
        )
        q = random(num_tokens, num_heads, KEY_DIM + ROPE_DIM)
        expansion = random(num_heads, KEY_DIM + VALUE_DIM, LATENT_DIM)
        return lambda: latent_attention(q, expansion, kv_cache, batch_plan, scale=(KEY_DIM + ROPE_DIM) ** -0.5)

    projection_products = length * (KEY_DIM + VALUE_DIM) * LATENT_DIM
    cost = 2 * num_heads * (count_pairs([(length, context)]) * (2 * LATENT_DIM + ROPE_DIM) + projection_products)
    name = f"captured MLA chunk of {length} over {context} {num_heads} heads"
    return BenchmarkCase(name, make_call, cost, "TFLOP/s", context * cache_dim * 2)


def work_list_planning_case(requests: Sequence[RequestLengths], num_table_rows: int, num_tokens: int) -> BenchmarkCase:
    """Make a case of planning a `WorkList`. The cost is the bytes of the input: two int32 numbers per table row."""
    from nanovllm_kernels.attention.plan import tile_configs

    config = tile_configs.gqa_tile_config(HEAD_DIM, 2, NUM_HEADS // NUM_KV_HEADS, many_queries=True)

    def make_call() -> Callable[[], object]:
        _, *lengths = make_step_tables(requests, num_table_rows, PAGE_SIZE)
        return lambda: make_work_list(
            *lengths,
            range(2, num_tokens + 1),
            WorkListFilter(),
            config,
            block_q=config.block_m * NUM_KV_HEADS // NUM_HEADS,
            num_head_blocks=NUM_KV_HEADS,
            num_tokens=num_tokens,
        )

    return BenchmarkCase(
        f"captured plan of work {num_tokens} tokens", make_call, num_table_rows * 8, "GB/s", COLD_BYTES // 4
    )


def captured_cases() -> Iterator[BenchmarkCase]:
    """Yield cases of whole prompts, chunks over long contexts, draft tokens to verify, and steps without requests."""
    backends: list[Backend | None] = ["triton"]
    backends += ["fastest"] if has_flash_attention() or has_cute() else []
    backends += [None] if has_flash_attention() else []
    for length in (16, 100, 512):
        for context in (8192, 32_768, MAX_SEQ_LEN):
            name, requests = f"chunk of {length} over {context}", [(length, context)]
            for backend in backends:
                # With 16 queries, the loads of keys limit the speed: report bytes per second too.
                for counts_bytes in (False, True) if length == 16 else (False,):
                    yield captured_attention_case(
                        name, requests, num_table_rows=256, num_tokens=512, backend=backend, counts_bytes=counts_bytes
                    )
    for num_heads in (16, 128):
        yield captured_latent_chunk_case(100, 32_768, num_heads)
    requests = [(2047, 2047)] * 4
    for num_table_rows in (32, 256):
        for backend in backends:
            name = f"prompts 4 x 2047 in {num_table_rows} entries"
            for has_only_whole_prompts in (False, True) if backend == "fastest" else (False,):
                yield captured_attention_case(
                    name,
                    requests,
                    num_table_rows=num_table_rows,
                    num_tokens=8192,
                    heads=SMALL_MODEL_HEADS,
                    backend=backend,
                    has_only_whole_prompts=has_only_whole_prompts,
                )
    yield captured_attention_case(
        "drafts of 3 in 64 x 2048",
        [(4, 2048)] * 64,
        num_table_rows=64,
        num_tokens=256,
        max_query_len=4,
        backend="triton",
        counts_bytes=True,
    )
    for backend in backends:
        yield captured_attention_case("step without work", [], num_table_rows=256, num_tokens=512, backend=backend)
    yield work_list_planning_case([(100, 32_768)], 256, 512)
    yield work_list_planning_case(requests, 256, 8192)
