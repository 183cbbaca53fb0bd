"""Works of attention as a captured step launches it: padded tokens, empty places, lengths known to the device only.

Whole prompts and most chunks cost their operations. Works named "by bytes" cost the bytes of cache that they read.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from nanovllm_kernels.attention import Backend, paged_attention, plan_batch
from nanovllm_kernels.attention.gqa import flash_prefill
from nanovllm_kernels.attention.gqa.flash_prefill import TMA_PAGE_SIZE
from nanovllm_kernels.attention.mla import latent_attention, plan_latent_batch
from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.attention.plan.work_list import WorkListFilter, make_work_list
from nanovllm_kernels.ladder.attention import KEY_DIM, LATENT_DIM, ROPE_DIM, VALUE_DIM
from nanovllm_kernels.ladder.inputs import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, random
from nanovllm_kernels.ladder.timing import COLD_BYTES, Work
from nanovllm_kernels.platform import has_cute, has_flash_attention

# Block tables are as wide as the longest request that the engine accepts.
MAX_SEQ_LEN = 131_072
PAGE_SIZE = TMA_PAGE_SIZE
# Query and key-value heads of Qwen3-0.6B.
FEW_HEADS = (16, 8)
# (queries, total tokens) of a request.
Request = tuple[int, int]


def step_tables(requests: Sequence[Request], places: int, page_size: int) -> tuple[torch.Tensor, ...]:
    """Return (block tables, seq_lens, query_start_loc) of the requests and empty places; pages in random order."""
    pages = [-(-length // page_size) for _, length in requests]
    order = torch.randperm(max(1, sum(pages)), device="cuda").int()
    tables = torch.zeros((places, MAX_SEQ_LEN // page_size), dtype=torch.int32, device="cuda")
    for place, count in enumerate(pages):
        tables[place, :count] = order[sum(pages[:place]) :][:count]
    seq_lens = torch.zeros(places, dtype=torch.int32)
    seq_lens[: len(requests)] = torch.tensor([length for _, length in requests], dtype=torch.int32)
    counts = torch.zeros(places + 1, dtype=torch.int32)
    counts[1 : len(requests) + 1] = torch.tensor([count for count, _ in requests], dtype=torch.int32)
    return tables, seq_lens.cuda(), counts.cumsum(0, dtype=torch.int32).cuda()


def num_pairs(requests: Sequence[Request]) -> float:
    """Return the number of (query, visible key) pairs."""
    return sum(count * (length - count) + count * (count + 1) / 2 for count, length in requests)


def captured_attention(
    name: str,
    requests: Sequence[Request],
    *,
    places: int,
    num_tokens: int,
    max_query_len: int | None = None,
    heads: tuple[int, int] = (NUM_HEADS, NUM_KV_HEADS),
    backend: Backend | None,
    by_bytes: bool = False,
    whole: bool = False,
) -> Work:
    """Attention of `requests` in a step of `num_tokens` tokens.

    backend: None for FlashAttention alone. whole: as for `plan_batch`.
    """
    num_heads, num_kv_heads = heads
    num_pages = max(1, sum(-(-length // PAGE_SIZE) for _, length in requests))
    longest = num_tokens if max_query_len is None else max_query_len

    def make(_: int) -> Callable[[], object]:
        kv_cache = random(num_pages, PAGE_SIZE, 2 * num_kv_heads, HEAD_DIM)
        tables = step_tables(requests, places, PAGE_SIZE)
        qkv, scale = random(num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM), HEAD_DIM**-0.5
        q, own = qkv.split_with_sizes((num_heads, 2 * num_kv_heads), 1)
        if backend is None:
            block_tables, seq_lens, starts = tables
            flash = FlashRequests(starts, starts.diff(), seq_lens, block_tables)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            return lambda: flash_prefill.attend_to_pages(q, kv_cache, flash, scale, longest, out)
        planned = plan_batch(
            *tables,
            num_decodes=None,
            max_query_len=longest,
            max_seq_len=MAX_SEQ_LEN,
            num_heads=num_heads,
            kv_cache=kv_cache,
            backend=backend,
            num_tokens=num_tokens,
            has_only_whole_prompts=whole,
        )
        return lambda: paged_attention(q, kv_cache, planned, scale=scale, own_keys_values=own)

    cached_bytes = sum(length for _, length in requests) * 2 * num_kv_heads * HEAD_DIM * 2
    cost, unit = (cached_bytes, "TB/s") if by_bytes else (4 * num_heads * HEAD_DIM * num_pairs(requests), "TFLOP/s")
    label = "flash alone" if backend is None else backend
    name = f"captured {name} {label}" + (" by bytes" if by_bytes else "") + (" whole" if whole else "")
    return Work(name, make, cost, unit, max(cached_bytes, COLD_BYTES // 8))


def captured_latent_chunk(length: int, context: int, num_heads: int) -> Work:
    """The last `length` tokens of `context` over latents, in a captured step of 512 tokens and 256 places."""
    page_size, num_tokens, width = 64, 512, LATENT_DIM + ROPE_DIM

    def make(_: int) -> Callable[[], object]:
        kv_cache = random(context // page_size, page_size, 1, width)
        planned = plan_latent_batch(
            *step_tables([(length, context)], 256, page_size),
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
        return lambda: latent_attention(q, expansion, kv_cache, planned, scale=(KEY_DIM + ROPE_DIM) ** -0.5)

    products = length * (KEY_DIM + VALUE_DIM) * LATENT_DIM
    cost = 2 * num_heads * (num_pairs([(length, context)]) * (2 * LATENT_DIM + ROPE_DIM) + products)
    name = f"captured MLA chunk of {length} over {context} {num_heads} heads"
    return Work(name, make, cost, "TFLOP/s", context * width * 2)


def plan_of_work(requests: Sequence[Request], places: int, num_tokens: int) -> Work:
    """The kernel that plans wide tiles, once per step."""
    from nanovllm_kernels.attention.plan import tile_configs

    config = tile_configs.gqa_tile_config(HEAD_DIM, 2, NUM_HEADS // NUM_KV_HEADS, is_wide=True)

    def make(_: int) -> Callable[[], object]:
        _, *lengths = step_tables(requests, places, PAGE_SIZE)
        return lambda: make_work_list(
            *lengths,
            range(2, num_tokens + 1),
            WorkListFilter(),
            config,
            block_q=config.block_m * NUM_KV_HEADS // NUM_HEADS,
            num_head_blocks=NUM_KV_HEADS,
            num_tokens=num_tokens,
        )

    return Work(f"captured plan of work {num_tokens} tokens", make, places * 8, "GB/s", COLD_BYTES // 4)


def captured_works() -> Iterator[Work]:
    """Chunks over long contexts, whole prompts, drafts to verify, and steps without work."""
    backends: list[Backend | None] = ["triton"]
    backends += ["fastest"] if has_flash_attention() or has_cute() else []
    backends += [None] if has_flash_attention() else []
    for length in (16, 100, 512):
        for context in (8192, 32_768, MAX_SEQ_LEN):
            name, requests = f"chunk of {length} over {context}", [(length, context)]
            for backend in backends:
                # 16 queries are bound by loading keys, so that their cost is shown in bytes too.
                for by_bytes in (False, True) if length == 16 else (False,):
                    yield captured_attention(
                        name, requests, places=256, num_tokens=512, backend=backend, by_bytes=by_bytes
                    )
    for num_heads in (16, 128):
        yield captured_latent_chunk(100, 32_768, num_heads)
    for places in (32, 256):
        for backend in backends:
            name = f"prompts 4 x 2047 in {places} places"
            requests = [(2047, 2047)] * 4
            for whole in (False, True) if backend == "fastest" else (False,):
                yield captured_attention(
                    name, requests, places=places, num_tokens=8192, heads=FEW_HEADS, backend=backend, whole=whole
                )
    drafts = [(4, 2048)] * 64
    yield captured_attention(
        "drafts of 3 in 64 x 2048",
        drafts,
        places=64,
        num_tokens=256,
        max_query_len=4,
        backend="triton",
        by_bytes=True,
    )
    for backend in backends:
        yield captured_attention("step without work", [], places=256, num_tokens=512, backend=backend)
    yield plan_of_work([(100, 32_768)], 256, 512)
    yield plan_of_work([(2047, 2047)] * 4, 256, 8192)
