from itertools import pairwise, product

import pytest
import torch
from interpreted_samples import sample_product
from torch import Tensor

from nanovllm_kernels.gemm import block_fp8
from nanovllm_kernels.moe import (
    ChosenExperts,
    PackedExperts,
    _fused_experts_op,
    moe_reference,
    pack_experts,
    policy,
)
from nanovllm_kernels.platform import describe_device, has_cuda

needs_hopper = pytest.mark.skipif(
    not has_cuda() or describe_device(torch.device("cuda")).capability != (9, 0), reason="needs Hopper"
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def draw_case(
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    width: int,
    top_k: int,
    dtype: torch.dtype,
    device: str,
    *,
    quantized: bool = False,
    favourite: bool = False,
    shared: bool = False,
    eligible: range | None = None,
) -> tuple[Tensor, PackedExperts, ChosenExperts]:
    """favourite: all tokens choose the same experts. shared: each token's last choice is the last expert."""
    generator = torch.Generator(device).manual_seed(num_tokens * 31 + width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x = draw(num_tokens, hidden_size + 16).to(dtype)[:, :hidden_size]
    w13, w2 = draw(num_experts, 2 * width, hidden_size) * 0.2, draw(num_experts, hidden_size, width) * 0.2
    scales13 = scales2 = None
    if quantized:
        quantized_halves = [block_fp8.quantize_blocks(half) for weight in w13 for half in weight.chunk(2)]
        w13 = torch.stack([numbers for numbers, _ in quantized_halves]).view(num_experts, 2 * width, hidden_size)
        scales13 = torch.stack([scales for _, scales in quantized_halves]).unflatten(0, (num_experts, 2))
        quantized_downs = [block_fp8.quantize_blocks(weight) for weight in w2]
        w2, scales2 = (torch.stack(parts) for parts in zip(*quantized_downs, strict=True))
    else:
        w13, w2 = w13.to(dtype), w2.to(dtype)
    scores = draw(num_tokens, num_experts - shared)
    if eligible is not None:
        scores[:, : eligible.start] = scores[:, eligible.stop :] = -torch.inf
    weights, ids = scores.topk(top_k - shared, -1)
    if shared:
        weights = torch.cat((weights, draw(num_tokens, 1)), -1)
        ids = torch.cat((ids, torch.full_like(ids[:, :1], num_experts - 1)), -1)
    ids = (ids[:1].expand(num_tokens, -1) if favourite else ids).int().contiguous()
    counters = torch.zeros(policy.num_counters(hidden_size), dtype=torch.int32, device=device)
    experts = pack_experts(w13, w2, scales13, scales2)._replace(counters=counters)
    return x, experts, ChosenExperts(weights, ids)


def check_experts(
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    width: int,
    top_k: int,
    dtype: torch.dtype,
    device: str,
    *,
    residual: torch.dtype | None = None,
    quantized: bool = False,
    favourite: bool = False,
    shared: bool = False,
) -> Tensor:
    sizes = num_tokens, num_experts, hidden_size, width, top_k
    x, experts, chosen = draw_case(*sizes, dtype, device, quantized=quantized, favourite=favourite, shared=shared)
    generator = torch.Generator(device).manual_seed(num_tokens)
    added = None if residual is None else torch.randn(x.shape, device=device, generator=generator).to(residual)
    results = [_fused_experts_op(x, *experts, *chosen, added) for _ in range(2)]
    assert torch.equal(*results)
    assert not experts.counters.any()
    assert results[0].dtype == (x.dtype if residual is None else residual)
    wide_added = None if added is None else added.double()
    if quantized:
        expected = moe_reference.fused_experts(x.float(), experts, chosen, None)
        expected = expected + (0 if added is None else added.float())
    else:
        wide_experts = experts._replace(w13=experts.w13.double(), w2=experts.w2.double())
        expected = moe_reference.fused_experts(x.double(), wide_experts, chosen, wide_added)
    # A few e4m3 values are rounded the other way.
    tolerance = TOLERANCE[dtype] + (0.02 if quantized else 0.0)
    assert (results[0].double() - expected).norm() < tolerance * expected.norm()
    return results[0]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "width"),
    [(1, 4, 1, 32, 24), (2, 16, 3, 40, 80), (3, 5, 3, 32, 24), (3, 5, 3, 40, 80), (20, 6, 2, 32, 24)],
)
def test_few_tokens_match_reference(num_tokens, num_experts, top_k, hidden_size, width, device):
    dtype, residual = (torch.float16, torch.float32) if width == 24 else (torch.float32, None)
    check_experts(num_tokens, num_experts, hidden_size, width, top_k, dtype, device, residual=residual)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 14), (1, 40), (3, 12), (3, 40)])
@pytest.mark.parametrize("quantized", [False, True])
def test_few_tokens_with_shared_expert_match_reference(num_tokens, num_experts, quantized, device):
    check_experts(
        *(num_tokens, num_experts, 32, 24, 11, torch.float32, device),
        residual=torch.float32 if num_tokens > 1 else None,
        quantized=quantized,
        shared=True,
    )


@pytest.fixture
def small_unsorted_limits(monkeypatch):
    monkeypatch.setattr(policy, "MAX_UNSORTED_TOKENS", 2)
    monkeypatch.setattr(policy, "MAX_UNSORTED_FP8_TOKENS", 2)


@pytest.mark.usefixtures("small_unsorted_limits")
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(5, 20, 2), (15, 2, 2), (24, 1, 1), (40, 2, 2), (70, 2, 2)], ids=str
)
def test_many_tokens_match_reference(num_tokens, num_experts, top_k, device):
    check_experts(num_tokens, num_experts, 48, 40, top_k, torch.float16, device)
    if num_tokens < 20:
        check_experts(num_tokens, num_experts, 48, 40, top_k, torch.float32, device, residual=torch.float32)


@pytest.mark.usefixtures("small_unsorted_limits")
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(3, 17, 9), (40, 5, 3)])
@pytest.mark.parametrize("quantized", [False, True])
def test_many_tokens_with_shared_expert_match_reference(num_tokens, num_experts, top_k, quantized, device):
    sizes = num_tokens, num_experts, 48, 40, top_k
    check_experts(*sizes, torch.float32, device, residual=torch.float32, quantized=quantized, shared=True)


def test_many_tokens_of_one_expert_match_reference(device):
    check_experts(policy.MAX_UNSORTED_TOKENS + 80, 4, 32, 24, 1, torch.float16, device, favourite=True)


@pytest.mark.usefixtures("small_parts")
def test_many_tiles_and_parts_match_reference(device, monkeypatch):
    from nanovllm_kernels.moe import triton_grouped

    monkeypatch.setattr(triton_grouped, "SUM_BLOCK_COLUMNS", 16)
    check_experts(100, 4, 32, 24, 2, torch.float16, device)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_fp8_few_tokens_match_reference(num_tokens, device):
    check_experts(num_tokens, 3, 130, 40, 2, torch.float32, device, quantized=True)


@pytest.mark.parametrize(("tile", "top_k", "shared"), [(1024, 3, False), (8192, 3, True), (8192, 5, True)])
def test_fp8_one_token_with_partial_tiles_matches_reference(tile, top_k, shared, device, monkeypatch):
    monkeypatch.setattr(policy, "MAX_MATVEC_TILE_ELEMENTS", tile)
    sizes = 1, 6, 330, 134, top_k
    check_experts(*sizes, torch.float16, device, quantized=True, residual=torch.float32, shared=shared)


@pytest.mark.usefixtures("small_unsorted_limits")
@pytest.mark.parametrize(("num_tokens", "favourite"), [(1, False), (2, True), (7, False), (70, True), (140, False)])
def test_fp8_many_tokens_match_reference(num_tokens, favourite, device):
    residual = torch.float32 if favourite else None
    hidden_size, width = (130, 40) if num_tokens > 10 else (200, 144) if favourite or num_tokens > 2 else (48, 40)
    check_experts(
        *(num_tokens, 3, hidden_size, width, 2, torch.float32, device),
        residual=residual,
        quantized=True,
        favourite=favourite,
    )


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("num_experts", "hidden_size", "width", "top_k"), [(17, 768, 384, 4), (9, 256, 128, 3)])
@pytest.mark.parametrize("favourite", [False, True])
@pytest.mark.parametrize("num_tokens", [9, 200, 1000, 8192])
def test_specialized_kernel_equals_plain_kernel(
    num_tokens, favourite, num_experts, hidden_size, width, top_k, device, monkeypatch
):
    found = []
    for min_rows in (0, 1 << 30):
        monkeypatch.setattr(policy, "MIN_SPECIALIZED_AVERAGE_ROWS", min_rows)
        sizes = num_tokens, num_experts, hidden_size, width, top_k
        found.append(check_experts(*sizes, torch.bfloat16, device, quantized=True, favourite=favourite))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 64, 65, 200, 1000, 4000])
@pytest.mark.parametrize(
    ("num_experts", "hidden_size", "width", "top_k", "shared"),
    [(128, 2048, 768, 8, False), (513, 2048, 512, 11, True), (64, 3072, 1536, 8, False), (65, 7168, 2048, 9, True)],
)
def test_large_experts_match_reference(num_tokens, num_experts, hidden_size, width, top_k, shared, quantized, device):
    sizes = num_tokens, num_experts, hidden_size, width, top_k
    check_experts(*sizes, torch.bfloat16, device, quantized=quantized, shared=shared)


def run_with_poisoned_memory(*arguments: object) -> Tensor:
    """Torch fills uninitialised tensors with NaN (integers: the largest value)."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return _fused_experts_op(*arguments)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def take_experts(experts: PackedExperts, first: int, end: int) -> PackedExperts:
    """The memory before and after the returned weights holds NaN."""
    own = []
    for tensor in experts[:4]:
        if tensor is not None:
            poisoned = torch.full_like(tensor, torch.nan)
            poisoned[first:end] = tensor[first:end]
            tensor = poisoned[first:end]
        own.append(tensor)
    return pack_experts(*own, first_id=first, num_all_experts=len(experts.w2))._replace(counters=experts.counters)


def even_bounds(num_experts: int, num_ranks: int) -> list[int]:
    return [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]


def check_ranks(
    x: Tensor, experts: PackedExperts, chosen: ChosenExperts, num_ranks: int, residual: Tensor | None
) -> None:
    added = torch.zeros_like(x) if residual is None else residual
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for first, end in pairwise(even_bounds(len(experts.w2), num_ranks)):
        result = run_with_poisoned_memory(x, *take_experts(experts, first, end), *chosen, residual)
        assert result.dtype == added.dtype
        is_unused = ((chosen.ids < first) | (chosen.ids >= end)).all(1)
        assert torch.equal(result[is_unused], added[is_unused])
        assert not experts.counters.any()
        total += result.double() - added.double()
    expected = run_with_poisoned_memory(x, *experts, *chosen, residual).double() - added.double()
    tolerance = TOLERANCE[x.dtype] + (0.0 if experts.scales13 is None else 0.02)
    assert (total - expected).norm() < tolerance * expected.norm()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("kernel_and_input", "experts_of_ranks"),
    sample_product(
        [
            ("matvec", 1, "block FP8"),
            *product(("unsorted",), (1, 2, 5), ("float32", "bfloat16", "block FP8")),
            *product(("grouped",), (2, 40), ("float32", "bfloat16", "block FP8")),
        ],
        [(2, 8, 3, False), (4, 13, 4, True)],
    ),
    ids=str,
)
def test_results_of_ranks_add_up(kernel_and_input, experts_of_ranks, device, monkeypatch):
    kernel, num_tokens, weight_format = kernel_and_input
    num_ranks, num_experts, top_k, shared = experts_of_ranks
    monkeypatch.setattr(policy, "choose_kernel", lambda *_: kernel)
    # Launch fewer programs, because Triton's interpreter runs them one after another.
    monkeypatch.setattr(policy, "MATVEC_COLUMNS", 16)
    bounds = even_bounds(num_experts, num_ranks)
    sizes = num_tokens, num_experts, *((200, 144) if kernel == "matvec" else (32, 24)), top_k
    dtype, quantized = torch.bfloat16 if weight_format == "bfloat16" else torch.float32, weight_format == "block FP8"
    for eligible in (None, range(bounds[1]), range(bounds[-2], num_experts - shared)):
        case = draw_case(*sizes, dtype, device, quantized=quantized, shared=shared, eligible=eligible)
        check_ranks(*case, num_ranks, None if eligible is None else torch.randn(case[0].shape, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 33, 64, 200, 1000, 4000])
@pytest.mark.parametrize(
    ("num_experts", "hidden_size", "width", "top_k", "shared"),
    [(257, 2048, 512, 9, True), (64, 3072, 1536, 8, False), (33, 7168, 2048, 8, True)],
)
def test_results_of_ranks_with_large_experts_add_up(
    num_tokens, num_experts, hidden_size, width, top_k, shared, quantized, device
):
    sizes = num_tokens, num_experts, hidden_size, width, top_k
    for num_ranks, eligible in ((2, None), (4, None), (4, range(num_experts // 4))):
        case = draw_case(*sizes, torch.bfloat16, device, quantized=quantized, shared=shared, eligible=eligible)
        check_ranks(*case, num_ranks, torch.randn(case[0].shape, device=device))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 9, 200, 1000, 8192])
@pytest.mark.parametrize("eligible", [None, range(4)])
def test_specialized_kernel_equals_plain_kernel_on_each_rank(num_tokens, eligible, device, monkeypatch):
    sizes = num_tokens, 17, 768, 384, 4
    case = draw_case(*sizes, torch.bfloat16, device, quantized=True, shared=True, eligible=eligible)
    x, experts, chosen = case
    for first, end in pairwise(even_bounds(17, 4)):
        own, found = take_experts(experts, first, end), []
        for kernel in ("specialized", "grouped"):
            monkeypatch.setattr(policy, "choose_kernel", lambda *_, kernel=kernel: kernel)
            found.append(run_with_poisoned_memory(x, *own, *chosen, None))
        assert torch.equal(*found)
    monkeypatch.setattr(policy, "choose_kernel", lambda *_: "specialized")
    check_ranks(*case, 2, torch.randn(x.shape, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 1000])
def test_graph_of_a_rank_replays_with_other_experts(num_tokens, quantized, device):
    sizes = num_tokens, 64, 2048, 512, 8
    x, experts, captured = draw_case(*sizes, torch.bfloat16, device, quantized=quantized, eligible=range(16))
    own = take_experts(experts, 0, 16)
    others = (draw_case(*sizes, torch.bfloat16, device, eligible=each)[2] for each in (None, range(16, 64), range(16)))
    residual = torch.randn(x.shape, device=device)
    _fused_experts_op(x, *own, *captured, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _fused_experts_op(x, *own, *captured, residual)
    for other in others:
        for target, source in zip(captured, other, strict=True):
            target.copy_(source)
        graph.replay()
        assert torch.equal(result, _fused_experts_op(x, *own, *other, residual))
