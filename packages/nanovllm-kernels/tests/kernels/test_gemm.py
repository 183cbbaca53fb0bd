import itertools

import pytest
import torch
from interpreted_samples import sample_product
from torch.nn import functional

from nanovllm_kernels import gemm
from nanovllm_kernels.gemm import PackedWeight, logits, split_float32, tiles

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OPS = torch.ops.nanovllm


def check(
    num_rows, num_columns, width, dtype, device, *, norm, bias, residual, gated, float32_out=False, residual_dtype=None
):
    """residual_dtype: dtype of `x` and of the residual. None: `dtype`."""

    def draw(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype)

    num_weight_rows = num_columns * (2 if gated else 1)
    x, weight = draw(num_rows, width + 16, dtype=residual_dtype or dtype)[:, :width], draw(num_weight_rows, width) * 0.1
    norm_weight, bias_vector = draw(width), draw(num_weight_rows)
    added = draw(num_rows, num_columns, dtype=residual_dtype or dtype)
    expected = x.double()
    if norm:
        expected = expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
    expected = expected @ weight.double().T
    if bias:
        expected += bias_vector.double()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = functional.silu(gate) * up
    if residual:
        expected += added.double()
    actual = OPS.project_few_rows(
        x,
        norm_weight if norm else None,
        1e-5,
        weight,
        bias_vector if bias else None,
        added if residual else None,
        gated,
        float32_out,
    )
    out_dtype = added.dtype if residual else dtype
    assert actual.dtype == (torch.float32 if float32_out else out_dtype)
    assert actual.shape == expected.shape
    # Sums that nearly cancel have large errors relative to the result.
    size = expected.norm() + expected.numel() ** 0.5
    assert (actual.double() - expected).norm() < TOLERANCE[dtype] * size


@pytest.mark.parametrize(("num_rows", "dtype"), sample_product([1, 2, 3, 5, 8], [torch.float32, torch.float16]))
def test_small_products_match_float64(device, dtype, num_rows):
    for norm, gated, residual in itertools.product((False, True), repeat=3):
        check(num_rows, 37, 576, dtype, device, norm=norm, bias=residual, residual=residual, gated=gated)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_float32_residual_stream_matches_float64(device, num_rows):
    for norm, gated, residual in itertools.product((False, True), repeat=3):
        settings = {"norm": norm, "bias": False, "residual": residual, "gated": gated}
        check(num_rows, 37, 576, torch.float16, device, **settings, residual_dtype=torch.float32)


@pytest.mark.parametrize(
    ("shape", "size"),
    sample_product(["narrow", "deep", "wide", "vast"], [(1, 8), (5, 100), (37, 99), (30, 1500), (50, 2500)]),
)
def test_odd_sizes_match_float64(device, size, shape, monkeypatch):
    num_columns, width = size
    monkeypatch.setattr(tiles, "MAX_NARROW_COLUMNS", tiles.MAX_NARROW_COLUMNS if shape == "narrow" else 0)
    monkeypatch.setattr(tiles, "MIN_VOCABULARY_COLUMNS", 0 if shape == "vast" else tiles.MIN_VOCABULARY_COLUMNS)
    monkeypatch.setattr(tiles, "MIN_DEEP_DEPTH", 0 if shape == "deep" else tiles.MIN_DEEP_DEPTH)
    for num_rows in (1, 3):
        check(num_rows, num_columns, width, torch.float32, device, norm=True, bias=True, residual=True, gated=False)
        check(num_rows, num_columns, width, torch.float16, device, norm=True, bias=True, residual=True, gated=True)


def test_float32_output_of_float16_operands_matches_float64(device):
    check(2, 50, 64, torch.float16, device, norm=False, bias=False, residual=False, gated=False, float32_out=True)


def test_rows_may_have_any_stride(device):
    x, weight = torch.randn(64, 3, device=device).T, torch.randn(40, 64, device=device)
    actual = OPS.project_few_rows(x, None, 0.0, weight, None, None, False, False)
    torch.testing.assert_close(actual, x @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", range(1, 9))
def test_large_products_match_float64(device, dtype, num_rows):
    shapes = [(4096, 1024), (1024, 3072), (960, 576), (4096, 4096), (3072, 1024), (4096, 14336), (151_936, 1024)]
    for num_columns, width in shapes:
        for gated in (False, True):
            check(num_rows, num_columns, width, dtype, device, norm=gated, bias=True, residual=True, gated=gated)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 9, 256])
def test_logits_of_split_float32_table_are_float32_exact(device, num_rows):
    table = torch.randn(256, 3072, device=device)
    one_hot_rows = torch.eye(3072, device=device)[torch.randint(3072, (num_rows,), device=device)]
    for x in (torch.randn(num_rows, 3072, device=device).bfloat16(), one_hot_rows.bfloat16()):
        expected = x.double() @ table.double().T
        found = logits(x, PackedWeight(table, in_onednn_layout=False), table, split_float32(table))
        assert found.dtype == torch.float32
        # The error of tensor cores is 3e-6. The error of a bfloat16 weight would be 2e-3.
        assert (found - expected).norm() < 1e-5 * expected.norm()
    # Each result for a one-hot row is the sum of the three bfloat16 parts of one weight.
    torch.testing.assert_close(found.double(), expected, rtol=2**-23, atol=0)


def check_split_k(num_rows, num_columns, width, dtype, device, *, bias, residual, residual_dtype=None):
    def draw(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype)

    x, weight = draw(num_rows, width + 16)[:, :width], draw(num_columns, width) * 0.1
    bias_vector, added = draw(num_columns), draw(num_rows, num_columns, dtype=residual_dtype or dtype)
    counters = torch.zeros(tiles.num_split_counters(num_columns), dtype=torch.int32, device=device)
    expected = x.double() @ weight.double().T
    if bias:
        expected += bias_vector.double()
    if residual:
        expected += added.double()
    results = [
        OPS.project_split_k(x, weight, bias_vector if bias else None, added if residual else None, counters)
        for _ in range(2)
    ]
    assert torch.equal(*results)
    assert not counters.any()
    assert results[0].dtype == (added.dtype if residual else dtype)
    assert (results[0].double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(("num_rows", "has_addends"), [(9, False), (17, True), (70, True)])
def test_small_split_k_products_match_float64(device, num_rows, has_addends):
    assert tiles.is_split_faster(64, 2048)
    check_split_k(num_rows, 64, 2048, torch.float16, device, bias=has_addends, residual=has_addends)
    check_split_k(
        num_rows, 64, 2048, torch.float16, device, bias=False, residual=has_addends, residual_dtype=torch.float32
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 9, 16, 17, 32, 40, 64, 65, 128, 129, 200, 256])
def test_large_split_k_products_match_float64(device, dtype, num_rows):
    for num_columns, width in [(1024, 2048), (1024, 3072), (576, 2560), (64, 8192)]:
        check_split_k(num_rows, num_columns, width, dtype, device, bias=True, residual=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 9, 64, 256, 300])
def test_float32_residual_stream_is_not_rounded_to_weight_dtype(device, num_rows):
    width = 576
    stream = torch.randn(num_rows, width, device=device)
    norm_weight = torch.rand(width, device=device).to(torch.bfloat16)
    up, down = (
        gemm.pack_linear(torch.randn(shape, device=device).to(torch.bfloat16) / 24)
        for shape in ((2 * 1536, width), (width, 1536))
    )
    hidden = gemm.norm_gate_up(stream, norm_weight, 1e-5, up)
    assert hidden.dtype == torch.bfloat16
    expected = stream.double() + hidden.double() @ down.data.double().T
    bias = torch.randn(width, device=device).to(torch.bfloat16)
    actual = gemm.linear(hidden, down, None, stream.clone())
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    # cuBLAS rounds the sum of a product and a bias to bf16, before `linear` adds the residual.
    biased = gemm.linear(hidden, down, bias, stream.clone())
    assert biased.dtype == torch.float32
    torch.testing.assert_close(biased.double(), expected + bias.double(), rtol=1e-5, atol=2**-6)
    if num_rows > tiles.MAX_SPLIT_ROWS:
        batches = gemm.linear(hidden.unsqueeze(0), down, None, stream.unsqueeze(0).clone())
        torch.testing.assert_close(batches[0].double(), expected, rtol=1e-5, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 48])
def test_overlapping_launches_in_a_graph_see_finished_inputs(device, num_rows):
    torch.manual_seed(0)
    width = 1024
    inner = 2 * width
    weights = [torch.randn(width, inner, device=device).to(torch.bfloat16) / 48 for _ in range(64)]
    weights = [gemm.pack_linear(weight) for weight in weights]
    gates = [torch.randn(2 * inner, width, device=device).to(torch.bfloat16) / 32 for _ in range(64)]
    norm_weight = torch.ones(width, device=device, dtype=torch.bfloat16)
    start = torch.randn(num_rows, width, device=device).to(torch.bfloat16)

    def run(*, synchronized):
        x = start
        for weight, gate in zip(weights, gates, strict=True):
            hidden = gemm.norm_gate_up(x, norm_weight, 1e-5, gate)
            if synchronized:
                torch.cuda.synchronize()
            x = gemm.linear(hidden, weight, None, x)
            if synchronized:
                torch.cuda.synchronize()
        return x

    expected = run(synchronized=True)
    assert torch.equal(run(synchronized=False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(synchronized=False)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
