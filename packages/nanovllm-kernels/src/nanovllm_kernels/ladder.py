"""How fast the kernels run on this GPU, against what its memory and its tensor cores could do.

    python -m nanovllm_kernels.ladder [--json FILE] [--only WORD]

Each figure is the median of CUDA-graph replays over several copies of the inputs that together exceed the L2 cache, so
that every replay finds it cold. Bytes and operations are those the work must cost: what a kernel reads twice
counts once.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from nanovllm_kernels import fp8
from nanovllm_kernels.attention import paged_attention, plan_batch
from nanovllm_kernels.attention.mla import latent_attention, plan_latent_batch
from nanovllm_kernels.elementwise import plan_rotation, rms_norm, rope_and_cache, silu_and_mul
from nanovllm_kernels.gemm import block_fp8, linear, logits, norm_gate_up, norm_linear, pack_linear, tiles
from nanovllm_kernels.linear_attention import DeltaWeights, gated_delta_net, plan_states
from nanovllm_kernels.moe import PackedExperts, Routing, fused_experts, pack_experts, route
from nanovllm_kernels.platform import describe, has_cuda, has_cute, has_flash_attention
from nanovllm_kernels.sampling import sample

DTYPE = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DELTA_K_HEADS, DELTA_V_HEADS, DELTA_DIM = 16, 32, 128
# DeepSeek-V3's: of a head's key those not rotated and those rotated, of its value, and of a latent.
KEY_DIM, ROPE_DIM, VALUE_DIM, LATENT_DIM = 128, 64, 128, 512
COLD_BYTES = 256 << 20
MOST_COPIES = 32
ROUNDS = 20


Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Figure:
    """One line of the ladder: `rate` in `unit`, `microseconds` a call."""

    name: str
    microseconds: float
    rate: float
    unit: str


@dataclass(frozen=True)
class Work:
    """A call to time: `make(copy)` returns it bound to inputs of its own; `cost` in bytes or operations a call."""

    name: str
    make: Callable[[int], Callable[[], object]]
    cost: float
    unit: str
    input_bytes: float


def measure(work: Work) -> Figure:
    """Replay one graph that calls each copy once, and take the median time of a call."""
    # What was measured before had inputs of other shapes.
    torch.cuda.empty_cache()
    copies = max(1, min(MOST_COPIES, int(COLD_BYTES // work.input_bytes) + 1))
    calls = [work.make(copy) for copy in range(copies)]
    # The calls run on another stream than the one that fills their inputs.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / copies)
    microseconds = statistics.median(times)
    scale = {"TB/s": 1e6, "GB/s": 1e3, "TFLOP/s": 1e6}[work.unit]
    return Figure(work.name, microseconds, work.cost / microseconds / scale, work.unit)


def random(*shape: int) -> torch.Tensor:
    """Normal numbers in bf16 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def decode_inputs(batch: int, context: int, page_size: int, *, in_fp8: bool) -> tuple[torch.Tensor | None, ...]:
    """(queries, cache, scales, tables, lengths) of one query a request over `context` tokens, pages in random order."""
    width = context // page_size
    num_blocks = batch * width + 1
    shape = (num_blocks, page_size, 2 * NUM_KV_HEADS, HEAD_DIM)
    if in_fp8:
        # Any numbers but NaN, and none above 2.
        kv_cache = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8).bitwise_and_(0xBF).view(fp8.DTYPE)
    else:
        kv_cache = random(*shape)
    kv_scales = fp8.make_scales(kv_cache) if in_fp8 else None
    tables = (torch.randperm(num_blocks - 1, device="cuda") + 1).view(batch, width).int()
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return random(batch, NUM_HEADS, HEAD_DIM), kv_cache, kv_scales, tables, seq_lens


def decode_work(
    name: str, make: Callable[[int], Callable[[], object]], batch: int, context: int, page_size: int, *, in_fp8: bool
) -> Work:
    """Decode attention, whose cost is its keys and values, with their scales."""
    cost = 2 * batch * context * NUM_KV_HEADS * (HEAD_DIM + fp8.SCALE_BYTES if in_fp8 else HEAD_DIM * 2)
    prefix = "FP8 " if in_fp8 else ""
    return Work(f"{prefix}{name} batch {batch} context {context} page {page_size}", make, cost, "TB/s", cost)


def decode(batch: int, context: int, page_size: int, *, in_fp8: bool = False) -> Work:
    """Decode attention by Triton, over a cache of bf16 or of FP8."""

    def make(_: int) -> Callable[[], object]:
        q, kv_cache, kv_scales, tables, seq_lens = decode_inputs(batch, context, page_size, in_fp8=in_fp8)
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        planned = plan_batch(
            tables,
            seq_lens,
            starts,
            num_decodes=batch,
            max_query_len=1,
            max_seq_len=context,
            num_heads=NUM_HEADS,
            kv_cache=kv_cache,
            backend="triton",
            dtype=DTYPE,
        )
        return lambda: paged_attention(q, kv_cache, planned, scale=HEAD_DIM**-0.5, kv_scales=kv_scales)

    return decode_work("decode", make, batch, context, page_size, in_fp8=in_fp8)


def cute_decode(batch: int, context: int, page_size: int, *, in_fp8: bool = False) -> Work:
    """The same by the CuTe DSL."""
    from nanovllm_kernels.attention.cute_decode import make_workspace, paged_decode

    def make(_: int) -> Callable[[], object]:
        q, kv_cache, kv_scales, tables, seq_lens = decode_inputs(batch, context, page_size, in_fp8=in_fp8)
        out, workspace = torch.empty_like(q), make_workspace(batch, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, q.device)
        return lambda: paged_decode(q, kv_cache, kv_scales, tables, seq_lens, HEAD_DIM**-0.5, workspace, out)

    return decode_work("CuTe decode", make, batch, context, page_size, in_fp8=in_fp8)


def flash_decode(batch: int, context: int, page_size: int) -> Work:
    """The same by FlashAttention, which the engine leaves to prompts."""
    from nanovllm_kernels.attention.flash_prefill import paged_prefill

    def make(_: int) -> Callable[[], object]:
        q, kv_cache, _, tables, seq_lens = decode_inputs(batch, context, page_size, in_fp8=False)
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        query_lens, out = starts.diff(), torch.empty_like(q)
        return lambda: paged_prefill(q, kv_cache, tables, seq_lens, starts, query_lens, HEAD_DIM**-0.5, 1, out)

    return decode_work("flash decode", make, batch, context, page_size, in_fp8=False)


def latent_attention_work(
    name: str, batch: int, query_len: int, context: int, num_heads: int, cost: float, unit: str, *, in_fp8: bool = False
) -> Work:
    """Latent attention of `query_len` queries a request at the end of `context` tokens, pages of 64 in random order,
    with the products that bring queries to the latents and results back.
    """
    page_size, width = 64, LATENT_DIM + ROPE_DIM

    def make(_: int) -> Callable[[], object]:
        num_pages = batch * context // page_size
        kv_cache = random(num_pages, page_size, 1, width)
        if in_fp8:
            # Any numbers but NaN, and none above 2.
            numbers = torch.randint(0, 256, kv_cache.shape, device="cuda", dtype=torch.uint8)
            kv_cache = numbers.bitwise_and_(0xBF).view(fp8.DTYPE)
        kv_scales = fp8.make_scales(kv_cache) if in_fp8 else None
        tables = torch.randperm(num_pages, device="cuda").view(batch, -1).int()
        planned = plan_latent_batch(
            tables,
            torch.full((batch,), context, dtype=torch.int32, device="cuda"),
            torch.arange(batch + 1, dtype=torch.int32, device="cuda") * query_len,
            num_decodes=batch if query_len == 1 else 0,
            max_query_len=query_len,
            max_seq_len=context,
            num_heads=num_heads,
            kv_cache=kv_cache,
            backend="triton",
            dtype=DTYPE,
        )
        q = random(batch * query_len, num_heads, KEY_DIM + ROPE_DIM)
        expansion = random(num_heads, KEY_DIM + VALUE_DIM, LATENT_DIM)
        scale = (KEY_DIM + ROPE_DIM) ** -0.5
        return lambda: latent_attention(q, expansion, kv_cache, planned, scale=scale, kv_scales=kv_scales)

    prefix = "FP8 " if in_fp8 else ""
    input_bytes = batch * context * width * (1 if in_fp8 else 2)
    return Work(f"{prefix}{name} {num_heads} heads {batch} x {context}", make, cost, unit, input_bytes)


def latent_decode(batch: int, context: int, num_heads: int, *, in_fp8: bool = False) -> Work:
    """Decodes: in bytes, latents and what expands them, where heads are few; else in operations."""
    if num_heads <= 16:
        cached = batch * context * (LATENT_DIM + ROPE_DIM) * (1 if in_fp8 else 2)
        cost = cached + num_heads * (KEY_DIM + VALUE_DIM) * LATENT_DIM * 2
        return latent_attention_work("MLA decode", batch, 1, context, num_heads, cost, "TB/s", in_fp8=in_fp8)
    cost = 2 * batch * num_heads * (context * (2 * LATENT_DIM + ROPE_DIM) + (KEY_DIM + VALUE_DIM) * LATENT_DIM)
    return latent_attention_work("MLA decode", batch, 1, context, num_heads, cost, "TFLOP/s", in_fp8=in_fp8)


def latent_prefill(batch: int, length: int, num_heads: int) -> Work:
    """Whole prompts, in the operations that plain attention takes."""
    pairs = length * (length + 1) / 2
    cost = 2 * batch * num_heads * pairs * (KEY_DIM + ROPE_DIM + VALUE_DIM)
    return latent_attention_work("MLA prefill", batch, length, length, num_heads, cost, "TFLOP/s")


def latent_works() -> Iterator[Work]:
    """Latent attention with the heads that one of eight ranks has, and with all of them."""
    for num_heads in (16, 128):
        for batch, context in ((1, 8192), (64, 2048), (64, 8192), (256, 2048)):
            for in_fp8 in (False, True):
                yield latent_decode(batch, context, num_heads, in_fp8=in_fp8)
        yield latent_prefill(4, 2048, num_heads)


def prefill(batch: int, length: int) -> Work:
    """Whole prompts, causal."""
    page_size = 16
    width = length // page_size

    def make(_: int) -> Callable[[], object]:
        kv_cache = random(batch * width, page_size, 2 * NUM_KV_HEADS, HEAD_DIM)
        tables = torch.randperm(batch * width, device="cuda").view(batch, width).int()
        q = random(batch * length, NUM_HEADS, HEAD_DIM)
        seq_lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
        planned = plan_batch(
            tables,
            seq_lens,
            starts,
            num_decodes=0,
            max_query_len=length,
            max_seq_len=length,
            num_heads=NUM_HEADS,
            kv_cache=kv_cache,
            backend="triton",
        )
        return lambda: paged_attention(q, kv_cache, planned, scale=HEAD_DIM**-0.5)

    cost = 4 * batch * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2
    return Work(f"prefill {batch} x {length}", make, cost, "TFLOP/s", COLD_BYTES)


def elementwise(num_tokens: int) -> Iterator[Work]:
    """Norms, rotary embedding and gate of an 8B model's shapes."""
    hidden, intermediate = 4096, 14336
    row = num_tokens * hidden * 2
    weight = random(hidden)

    def make_norm(_: int) -> Callable[[], object]:
        x = random(num_tokens, hidden)
        return lambda: rms_norm(x, weight, 1e-5)

    def make_rope(_: int) -> Callable[[], object]:
        qkv = random(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        positions = torch.randint(0, 8192, (num_tokens,), device="cuda")
        rotation = plan_rotation(torch.randn(8192, HEAD_DIM, device="cuda"), positions)
        num_blocks = num_tokens // 16 + 1
        slots = torch.randperm(num_blocks * 16, device="cuda")[:num_tokens]
        kv_cache = random(num_blocks, 16, 2 * NUM_KV_HEADS, HEAD_DIM)
        return lambda: rope_and_cache(qkv, rotation, slots, kv_cache)

    def make_gate(_: int) -> Callable[[], object]:
        x = random(num_tokens, 2 * intermediate)
        return lambda: silu_and_mul(x)

    rope = num_tokens * (2 * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM * 2 + HEAD_DIM * 4)
    gate = num_tokens * 3 * intermediate * 2
    yield Work(f"rms_norm {num_tokens} x {hidden}", make_norm, 2 * row, "GB/s", 2 * row)
    yield Work(f"rope_and_cache {num_tokens}", make_rope, rope, "GB/s", rope)
    yield Work(f"silu_and_mul {num_tokens} x {intermediate}", make_gate, gate, "GB/s", gate)


@dataclass(frozen=True)
class Shapes:
    """A model's widths: of the residual stream, of all heads with their keys and values, of the query heads alone."""

    name: str
    hidden: int
    qkv: int
    heads: int
    intermediate: int
    vocab: int


SHAPES = (Shapes("0.6B", 1024, 4096, 2048, 3072, 151_936), Shapes("8B", 4096, 6144, 4096, 14336, 128_256))


def projections(shapes: Shapes, num_rows: int) -> Iterator[Work]:
    """A layer's linears with what stands before and after them, and the head: as chosen for so many rows, and where
    that is the one kernel, in pieces too.
    """
    norm_weight = random(shapes.hidden)
    eps = 1e-5

    def norm_then(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(rms_norm(x, norm_weight, eps), weight)

    # By name: columns, width, what is chosen and the pieces, each of a weight, rows and a residual.
    works: dict[str, tuple[int, int, Call, Call]] = {
        "norm + qkv": (
            shapes.qkv,
            shapes.hidden,
            lambda weight, x, _: norm_linear(x, norm_weight, eps, weight),
            lambda weight, x, _: norm_then(weight, x),
        ),
        "o + residual": (
            shapes.hidden,
            shapes.heads,
            lambda weight, x, residual: linear(x, weight, None, residual),
            lambda weight, x, residual: residual.addmm_(x, weight.t()),
        ),
        "norm + gate + up": (
            2 * shapes.intermediate,
            shapes.hidden,
            lambda weight, x, _: norm_gate_up(x, norm_weight, eps, weight),
            lambda weight, x, _: silu_and_mul(norm_then(weight, x)),
        ),
        "down + residual": (
            shapes.hidden,
            shapes.intermediate,
            lambda weight, x, residual: linear(x, weight, None, residual),
            lambda weight, x, residual: residual.addmm_(x, weight.t()),
        ),
        "head": (
            shapes.vocab,
            shapes.hidden,
            lambda weight, x, _: logits(x, pack_linear(weight), weight),
            lambda weight, x, _: torch.mm(x, weight.t(), out_dtype=torch.float32),
        ),
    }
    for name, (columns, width, chosen, pieces) in works.items():
        calls = {"": chosen, " in pieces": pieces} if tiles.pays(num_rows, columns, width) else {"": chosen}
        cost = columns * width * 2
        for suffix, call in calls.items():

            def make(_: int, call: Call = call, columns: int = columns, width: int = width) -> Callable[[], object]:
                weight, x, residual = random(columns, width), random(num_rows, width), random(num_rows, columns)
                return lambda: call(weight, x, residual)

            yield Work(f"{shapes.name} {name}, {num_rows} rows{suffix}", make, cost, "TB/s", cost)


def block_fp8_linears(num_rows: int) -> Iterator[Work]:
    """Products with block FP8 weights of an 8B model and of DeepSeek-R1, what is multiplied quantised on its way: as
    chosen for so many rows. Few rows cost the weight.
    """
    for columns, width in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2112, 7168), (7168, 2048)):
        few = num_rows <= tiles.OWN_FP8_ROWS
        cost, unit = (columns * width, "TB/s") if few else (2 * num_rows * columns * width, "TFLOP/s")

        def make(_: int, columns: int = columns, width: int = width) -> Callable[[], object]:
            weight = block_fp8.empty_weight(columns, width, block_fp8.GROUP, torch.device("cuda"))
            numbers, scales = block_fp8.quantize_blocks(random(columns, width))
            weight.data.copy_(numbers)
            weight.scales.copy_(scales)
            x = random(num_rows, width)
            return lambda: block_fp8.linear(x, weight)

        yield Work(f"block FP8 {columns} x {width}, {num_rows} rows", make, cost, unit, columns * width)

    def make_rows(_: int) -> Callable[[], object]:
        x = random(num_rows, 4096)
        return lambda: block_fp8.quantize_groups(x)

    cost = num_rows * 4096 * 3
    yield Work(f"quantize_groups {num_rows} x 4096", make_rows, cost, "GB/s", cost)


@dataclass(frozen=True)
class Mixture:
    """A model's experts: how many, how many a token goes to, and their widths."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    width: int


MIXTURES = (Mixture("30B-A3B", 128, 8, 2048, 768), Mixture("M2", 256, 8, 3072, 1536))


def random_experts(mixture: Mixture, *, in_fp8: bool) -> PackedExperts:
    """Experts of normal numbers in bf16, or of any but NaN in FP8."""
    shapes = (
        (mixture.num_experts, 2 * mixture.width, mixture.hidden),
        (mixture.num_experts, mixture.hidden, mixture.width),
    )
    if not in_fp8:
        return pack_experts(*(random(*shape) for shape in shapes))
    numbers = (torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8).bitwise_and_(0xBF) for shape in shapes)
    rows, columns = -(-mixture.width // 128), -(-mixture.hidden // 128)
    scales13 = torch.rand(mixture.num_experts, 2, rows, columns, device="cuda")
    scales2 = torch.rand(mixture.num_experts, columns, rows, device="cuda")
    return pack_experts(*(part.view(fp8.DTYPE) for part in numbers), scales13, scales2)


def experts(mixture: Mixture, num_tokens: int, *, in_fp8: bool) -> Work:
    """Experts that tokens choose at random; the cost is the weights of those that any is expected to choose, or for
    many tokens the operations.
    """
    size = mixture.hidden * mixture.width

    def make(_: int) -> Callable[[], object]:
        packed = random_experts(mixture, in_fp8=in_fp8)
        x, residual = random(num_tokens, mixture.hidden), random(num_tokens, mixture.hidden)
        logits = torch.randn(num_tokens, mixture.num_experts, device="cuda")
        weights, ids = route(logits, Routing(mixture.top_k))
        return lambda: fused_experts(x, packed, weights, ids, residual)

    hit = mixture.num_experts * (1 - (1 - mixture.top_k / mixture.num_experts) ** num_tokens)
    read = 3 * hit * size * (1 if in_fp8 else 2)
    whole = 3 * mixture.num_experts * size * (1 if in_fp8 else 2)
    name = f"{'FP8 ' if in_fp8 else ''}experts {mixture.name}, {num_tokens} tokens"
    if num_tokens > 1024:
        return Work(name, make, 6 * num_tokens * mixture.top_k * size, "TFLOP/s", whole)
    return Work(name, make, read, "TB/s", whole)


def routing(mixture: Mixture, num_tokens: int) -> Work:
    """The choice of experts, whose cost is its logits."""

    def make(_: int) -> Callable[[], object]:
        logits = torch.randn(num_tokens, mixture.num_experts, device="cuda")
        bias = torch.randn(mixture.num_experts, device="cuda")
        return lambda: route(logits, Routing(mixture.top_k, "sigmoid"), bias)

    cost = 4 * num_tokens * mixture.num_experts
    return Work(f"route {mixture.name}, {num_tokens} tokens", make, cost, "GB/s", cost)


def mixtures() -> Iterator[Work]:
    """Mixtures of experts, from one token to many."""
    for mixture in MIXTURES:
        for num_tokens in (1, 4, 16, 64, 256, 1024, 8192):
            yield routing(mixture, num_tokens)
            yield experts(mixture, num_tokens, in_fp8=False)
            yield experts(mixture, num_tokens, in_fp8=True)
    # Of DeepSeek-V3's widths, about 32 rows each.
    yield experts(Mixture("of 16", 16, 1, 7168, 2048), 512, in_fp8=True)


def sampling(batch: int, vocab_size: int) -> Iterator[Work]:
    """Greedy, plain and filtered draws from float32 logits: steep ones, and ones of which top-p keeps most."""
    ones = torch.ones(batch, device="cuda")
    zeros = torch.zeros(batch, device="cuda")
    seeds = torch.arange(batch, device="cuda")
    cost = batch * vocab_size * 4

    def maker(temperature: float, top_k: int, top_p: float, spread: float) -> Callable[[int], Callable[[], object]]:
        def make(_: int) -> Callable[[], object]:
            logits = torch.randn((batch, vocab_size), device="cuda") * spread
            settings = (ones * temperature, (zeros + top_k).int(), ones * top_p, zeros, seeds, seeds)
            return lambda: sample(logits, *settings, all_greedy=temperature == 0, any_filter=top_k > 0 or top_p < 1)

        return make

    for name, settings in {
        "greedy": (0.0, 0, 1.0, 3.0),
        "gumbel": (0.6, 0, 1.0, 3.0),
        "top-k": (0.6, 50, 1.0, 3.0),
        "top-p": (0.6, 0, 0.9, 3.0),
        "top-p, flat": (0.6, 0, 0.9, 0.5),
        "top-k + top-p": (0.6, 50, 0.9, 3.0),
    }.items():
        yield Work(f"sample {batch} x {vocab_size} {name}", maker(*settings), cost, "GB/s", cost)


def delta_net(lengths: list[int], context: int, state_dtype: torch.dtype) -> Work:
    """Qwen3-Next's recurrent layer of requests with so many tokens each behind `context` others, from its projections
    to its gated norm: decodes in the bytes of their states, prompts in the operations of their recurrence.
    """
    batch, num_tokens, group, dim = len(lengths), sum(lengths), DELTA_V_HEADS // DELTA_K_HEADS, DELTA_DIM
    channels = DELTA_K_HEADS * (2 + group) * dim
    decodes = num_tokens == batch

    def make(_: int) -> Callable[[], object]:
        numbers = torch.tensor([lengths, [context + length for length in lengths]], dtype=torch.int32, device="cuda")
        planned = plan_states(
            torch.randperm(batch, device="cuda").int() + 1,
            torch.zeros((batch, 1, 2), dtype=torch.int32, device="cuda"),
            numbers[1],
            torch.cat((numbers.new_zeros(1), numbers[0].cumsum(0).int())),
            num_decodes=batch if decodes else 0,
            max_query_len=max(lengths),
            num_tokens=num_tokens,
            backend="triton",
        )
        ones = torch.ones(DELTA_V_HEADS, device="cuda")
        weights = DeltaWeights(random(4, channels).float(), ones, ones, torch.ones(dim, device="cuda"), 1e-6)
        recurrent = torch.randn((batch + 1, DELTA_V_HEADS, dim, dim), device="cuda").to(state_dtype)
        conv, ba = random(batch + 1, 4, channels), random(num_tokens, 2 * DELTA_V_HEADS)
        qkvz = random(num_tokens, channels + DELTA_V_HEADS * dim)
        return lambda: gated_delta_net(qkvz, ba, weights, recurrent, conv, planned)

    states = batch * DELTA_V_HEADS * dim * dim * state_dtype.itemsize
    kind = "decode" if decodes else f"prefill of {max(lengths)}"
    name = f"delta net {kind} batch {batch} {str(state_dtype).removeprefix('torch.')}"
    if decodes:
        cost = 2 * states + batch * (channels * 2 * 5 + 2 * DELTA_V_HEADS * dim * 2)
        return Work(name, make, cost, "TB/s", cost)
    rows = num_tokens * (channels + 2 * DELTA_V_HEADS * dim) * 2
    return Work(name, make, num_tokens * DELTA_V_HEADS * 6 * dim * dim, "TFLOP/s", states + rows)


def delta_nets() -> Iterator[Work]:
    """Decodes with states of both kinds, and prompts."""
    for batch in (1, 8, 64, 256):
        for state_dtype in (torch.float32, torch.bfloat16):
            yield delta_net([1] * batch, 1000, state_dtype)
    for lengths in ([8192], [2048] * 4, [64] * 64):
        yield delta_net(lengths, 0, torch.float32)


def copy_ceiling() -> Work:
    """What a plain copy reaches: the ceiling of every figure in bytes."""
    size = 1 << 30

    def make(_: int) -> Callable[[], object]:
        source = torch.empty(size, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Work("copy 1 GiB", make, 2 * size, "TB/s", 2 * size)


def ladder() -> Iterator[Work]:
    """All the work, smallest inputs first within a family."""
    yield copy_ceiling()
    for page_size in (16, 64):
        for batch in (1, 8, 64, 256):
            for context in (512, 2048, 8192, 32768):
                for in_fp8 in (False, True):
                    yield decode(batch, context, page_size, in_fp8=in_fp8)
                    if has_cute():
                        yield cute_decode(batch, context, page_size, in_fp8=in_fp8)
                if has_flash_attention():
                    yield flash_decode(batch, context, page_size)
    yield prefill(4, 2048)
    yield prefill(1, 8192)
    yield from latent_works()
    for num_tokens in (256, 8192):
        yield from elementwise(num_tokens)
    for shapes in SHAPES:
        for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            yield from projections(shapes, num_rows)
    yield from delta_nets()
    for num_rows in (1, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 4096):
        yield from block_fp8_linears(num_rows)
    yield from mixtures()
    for batch, vocab_size in ((1, 151_936), (128, 131_072), (256, 151_936)):
        yield from sampling(batch, vocab_size)


def selected(only: str) -> list[Work]:
    """The work whose name has `only` in it and whose inputs fit this GPU."""
    room = 0.4 * describe(torch.device("cuda", 0)).total_memory
    return [work for work in ladder() if only in work.name and work.input_bytes <= room]


def main() -> None:
    """Measure the ladder, print it, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="measure only the work whose name has this in it")
    arguments = parser.parse_args()
    if not has_cuda():
        sys.exit("this needs an NVIDIA GPU")
    device = describe(torch.device("cuda", 0))
    print(f"{device.name}, {device.num_sms} SMs, torch {torch.__version__}")  # noqa: T201 - the program's output
    figures = []
    for work in selected(arguments.only):
        figure = measure(work)
        figures.append(figure)
        print(f"{figure.name:44} {figure.microseconds:10.1f} us {figure.rate:9.2f} {figure.unit}", flush=True)  # noqa: T201
    document = json.dumps({"device": asdict(device), "figures": [asdict(figure) for figure in figures]})
    print(document)  # noqa: T201
    if arguments.json:
        arguments.json.write_text(document)


if __name__ == "__main__":
    main()
