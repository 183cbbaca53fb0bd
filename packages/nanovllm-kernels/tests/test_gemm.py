import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from nanovllm_kernels import gemm
from nanovllm_kernels.elementwise import prepare_norm_weight, rms_norm, silu_and_mul
from nanovllm_kernels.gemm import linear, logits, norm_gate_up, norm_linear, pack_linear, split_float32, tiles
from nanovllm_kernels.platform import MAX_FLOAT32_ROWS, computes_rows_in_float32, has_numba, prefers_packed_bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_linear_matches_float64(dtype, with_bias, num_tokens):
    weight, x = torch.randn(40, 64).to(dtype), torch.randn(num_tokens, 64).to(dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    tolerance = {"rtol": 2**-7, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    for form in (weight, pack_linear(weight)):
        out = linear(x, form, bias)
        assert out.dtype in (dtype, torch.float32)
        assert out.shape == (num_tokens, 40)
        torch.testing.assert_close(out.double(), expected, **tolerance)


@pytest.mark.parametrize(("shape", "with_bias"), [((300, 64), True), ((1, 300, 64), True), ((1, 300, 64), False)])
def test_many_rows_on_cuda_keep_the_dtype_of_the_residual(shape, with_bias):
    with FakeTensorMode():  # Computes shapes and dtypes, and needs no GPU.
        x, weight, bias = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in (shape, (40, 64), 40))
        residual = torch.empty((*shape[:-1], 40), device="cuda")
        out = linear(x, weight, bias if with_bias else None, residual)
    assert (out.dtype, out.shape) == (torch.float32, residual.shape)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_adds_a_residual(dtype, with_bias, device):
    weight, x, residual = (torch.randn(shape, device=device).to(dtype) for shape in [(40, 64), (3, 64), (3, 40)])
    bias = torch.randn(40, device=device).to(dtype) if with_bias else None
    expected = residual.double() + x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    tolerance = {"rtol": 2**-6, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    for form in (weight, pack_linear(weight)):
        out = linear(x, form, bias, residual.clone())
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, **tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_compiled_layer_matches_eager_layer(dtype, with_bias, device):
    def layer(x, norm, gate_up, down, gate_up_bias, down_bias):
        hidden = norm_gate_up(x, norm, 1e-5, gate_up, gate_up_bias)
        return norm_linear(linear(hidden, down, down_bias, x), norm, 1e-5, gate_up)

    shapes = [(12, 64), (64,), (96, 64), (64, 48), (96,), (64,)]
    x, norm, *others = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    *weights, gate_up_bias, down_bias = (each * 0.3 for each in others)
    biases = (gate_up_bias, down_bias) if with_bias else (None, None)
    expected = layer(x.clone(), prepare_norm_weight(norm), *weights, *biases)
    compiled_out = torch.compile(layer, fullgraph=True, backend="eager")(
        x, prepare_norm_weight(norm), *weights, *biases
    )
    tolerance = {"rtol": 2**-5, "atol": 8e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    assert compiled_out.dtype == dtype
    torch.testing.assert_close(compiled_out, expected, **tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 7, 16, 100, 300])
def test_norm_and_linear_match_float64(dtype, with_bias, num_rows, device):
    shapes = [(num_rows, 576), (960, 576), (576,), (960,)]
    x, weight, norm_weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    weight *= 0.1
    bias = bias if with_bias else None
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
    expected = normed @ weight.double().T + (bias.double() if bias is not None else 0)
    gate, up = expected.chunk(2, -1)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for form in (weight, pack_linear(weight)):
        for product, expected_out in ((norm_linear, expected), (norm_gate_up, functional.silu(gate) * up)):
            out = product(x, prepare_norm_weight(norm_weight), 1e-5, form, bias)
            assert out.dtype in (dtype, torch.float32)
            assert (out.double() - expected_out).norm() < tolerance * expected_out.norm()


@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.float32, 3), (torch.bfloat16, MAX_FLOAT32_ROWS + 1)])
def test_fused_linear_equals_separate_operators_on_cpu(dtype, num_rows):
    if dtype == torch.bfloat16 and computes_rows_in_float32(num_rows):
        pytest.skip("on this CPU one fused kernel computes this number of rows, without rounding in between")
    x, weight, norm_weight = (torch.randn(shape).to(dtype) for shape in [(num_rows, 64), (40, 64), (64,)])
    packed, norm = pack_linear(weight), prepare_norm_weight(norm_weight)
    unfused = linear(rms_norm(x, norm, 1e-5), packed)
    assert torch.equal(norm_linear(x, norm, 1e-5, packed), unfused)
    assert torch.equal(norm_gate_up(x, norm, 1e-5, packed), silu_and_mul(unfused))


def test_few_row_kernel_is_chosen_by_shape():
    assert not tiles.is_few_rows_faster(0, 4096, 1024)
    assert tiles.is_few_rows_faster(1, 151_936, 1024)
    assert tiles.is_few_rows_faster(2, 28672, 4096)
    assert tiles.is_few_rows_faster(3, 4096, 4096)
    assert not tiles.is_few_rows_faster(4, 6144, 4096)
    assert tiles.is_few_rows_faster(8, 1024, 3072)
    assert tiles.is_few_rows_faster(8, 6144, 1024)
    assert not tiles.is_few_rows_faster(8, 4096, 4096)
    assert not tiles.is_few_rows_faster(9, 8, 8)


def test_only_bf16_weights_are_packed():
    plain = torch.randn(8, 8)
    assert pack_linear(plain).data is plain
    assert pack_linear(plain.to(torch.bfloat16)).in_onednn_layout == prefers_packed_bf16()


def test_packing_accepts_any_layout():
    weight = torch.randn(64, 40).to(torch.bfloat16).T
    x = torch.randn(2, 64).to(torch.bfloat16)
    torch.testing.assert_close(linear(x, pack_linear(weight)).to(x.dtype), x @ weight.T, rtol=2**-7, atol=1e-2)


def test_row_counts_are_rounded_to_few_distinct_values_with_little_padding():
    row_counts = [gemm.round_up_rows(count) for count in range(2049)]
    assert len(set(row_counts)) <= 112
    assert all(count <= rounded <= count + min(count // 8, 31) for count, rounded in enumerate(row_counts))
    assert [gemm.round_up_rows(count) for count in (0, 1, 9, 15, 17, 130, 513)] == [0, 1, 9, 15, 18, 144, 544]


@pytest.mark.skipif(not prefers_packed_bf16(), reason="this CPU does not multiply bf16")
@pytest.mark.parametrize("shape", [(0,), (17,), (71,), (3, 11)])
def test_products_with_padded_rows_have_only_the_given_rows(shape):
    weight, bias = torch.randn(40, 64).to(torch.bfloat16), torch.randn(40).to(torch.bfloat16)
    x = torch.randn(*shape, 64).to(torch.bfloat16)
    found = linear(x, pack_linear(weight)._replace(panels=None), bias)
    assert found.shape == (*shape, 40)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias.double(), rtol=2**-7, atol=2e-2)


def test_few_rows_use_panels_beside_a_onednn_weight():
    weight = (torch.randn(40, 64) * 0.02).to(torch.bfloat16)
    packed = pack_linear(weight)
    assert (packed.panels is not None) == has_numba()
    if packed.in_onednn_layout:
        assert pack_linear(torch.zeros(4096, 4096, dtype=torch.bfloat16)).panels is None
    x, residual = torch.randn(9, 64).to(torch.bfloat16), torch.randn(9, 40).to(torch.bfloat16)
    many = linear(x, packed, None, residual.clone())
    few = torch.cat([linear(x[i : i + 1], packed, None, residual[i : i + 1].clone()) for i in range(9)])
    product = x.double() @ weight.double().T
    exact = product + residual
    # The kernel may round both the product and the sum.
    for found in (few, many):
        assert ((found - exact).abs() <= 2**-8 * (product.abs() + exact.abs()) + 1e-5).all()
    for num_rows in (1, 9):
        expected = torch.float32 if computes_rows_in_float32(num_rows) or not prefers_packed_bf16() else torch.bfloat16
        assert linear(x[:num_rows], packed).dtype == expected


@pytest.mark.skipif(not has_numba(), reason="needs Numba")
@pytest.mark.usefixtures("threads", "bf16_units")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 42, 43, 300])
@pytest.mark.parametrize(("num_columns", "width"), [(1, 1), (2, 7), (5, 576), (96, 33), (130, 1100)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_panel_products_are_summed_in_float32(num_rows, num_columns, width, with_bias):
    if not computes_rows_in_float32(num_rows):
        pytest.skip("on this CPU oneDNN multiplies this number of rows")
    torch.manual_seed(0)
    x, residual = torch.randn(num_rows, width), torch.randn(num_rows, num_columns)
    weight, norm_weight = torch.randn(2 * num_columns, width).bfloat16(), torch.randn(width).bfloat16()
    bias = torch.randn(2 * num_columns).bfloat16() if with_bias else None
    half, half_bias = weight[:num_columns], None if bias is None else bias[:num_columns]
    added = 0 if bias is None else bias.double()
    plain = x.double() @ weight.double().T + added
    normed = functional.rms_norm(x.double(), (width,), norm_weight.double(), 1e-5) @ weight.double().T + added
    gate, up = normed.chunk(2, -1)
    packed_norm, packed, packed_half = prepare_norm_weight(norm_weight), pack_linear(weight), pack_linear(half)
    pairs = [
        (linear(x, packed, bias), plain),
        (linear(x, packed_half, half_bias, residual.clone()), plain[:, :num_columns] + residual),
        (norm_linear(x, packed_norm, 1e-5, packed, bias), normed),
        (norm_gate_up(x, packed_norm, 1e-5, packed, bias), functional.silu(gate) * up),
        (logits(x, packed_half, half), x.double() @ half.double().T),
    ]
    for found, expected in pairs:
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 2e-6 * (1 + expected.norm())


@pytest.mark.skipif(not has_numba(), reason="needs Numba")
@pytest.mark.usefixtures("threads", "bf16_units")
@pytest.mark.parametrize(("num_columns", "width"), [(96, 576), (70, 1537)])
def test_panel_result_does_not_depend_on_other_rows(num_columns, width):
    torch.manual_seed(0)
    x, residual = torch.randn(300, width), torch.randn(300, num_columns)
    norm_weight, weight = prepare_norm_weight(torch.randn(width)), torch.randn(2 * num_columns, width).bfloat16()
    packed, half = pack_linear(weight), pack_linear(weight[:num_columns])

    def project(rows: slice) -> torch.Tensor:
        added = linear(x[rows], half, None, residual[rows].clone())
        normed = norm_linear(x[rows], norm_weight, 1e-5, packed)
        gated = norm_gate_up(x[rows], norm_weight, 1e-5, packed)
        return torch.cat((added, normed, gated, logits(x[rows], half, weight[:num_columns])), -1)

    row_counts = [
        count for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 42, 43, 252, 300) if computes_rows_in_float32(count)
    ]
    whole = project(slice(300 - row_counts[-1], 300))
    for count in row_counts:
        assert torch.equal(project(slice(300 - count, 300)), whole[-count:])


@pytest.mark.skipif(has_numba() and prefers_packed_bf16(), reason="this CPU multiplies bf16")
def test_unpacked_weight_is_multiplied_in_float32_without_bf16_units():
    x, weight = torch.randn(20, 64), torch.randn(40, 64).bfloat16()
    torch.testing.assert_close(linear(x, weight).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_float32_residual_keeps_its_precision(num_rows, x_dtype):
    weight = (torch.randn(40, 64) * 0.02).to(torch.bfloat16)
    # A bf16 sum with this large residual would lose the product.
    x, residual = torch.randn(num_rows, 64).to(x_dtype), torch.randn(num_rows, 40) + 1000
    expected = x.double() @ weight.double().T
    for form in (weight, pack_linear(weight)):
        out = linear(x, form, None, residual.clone())
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double() - residual.double(), expected, rtol=2**-7, atol=2e-3)


@pytest.mark.parametrize("num_rows", [2, 7])
def test_largest_logits_of_float32_rows_are_float32_exact(num_rows):
    table, x = torch.randn(300, 64).to(torch.bfloat16), torch.randn(num_rows, 64)
    found = logits(x, pack_linear(table), table)
    expected = x.double() @ table.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0.1)
    leaders = expected.topk(5).indices
    torch.testing.assert_close(found.gather(1, leaders).double(), expected.gather(1, leaders), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [2, 7])
def test_logits_differ_where_bf16_would_tie(num_rows, dtype, device):
    table = torch.randn(300, 64, device=device).to(dtype)
    table[7] = table[200]
    table[7, 0] += 0.25
    x = torch.randn(num_rows, 64, device=device).to(dtype)
    x[0], x[0, 0] = 30 * table[200], 0.5
    found = logits(x, pack_linear(table), table)
    expected = x.double() @ table.double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0.1)
    assert found[0].argmax() == expected[0].argmax()
    leaders = expected.topk(5).indices
    torch.testing.assert_close(found.gather(1, leaders).double(), expected.gather(1, leaders), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("size", [5, 700, 1024, 5000])
def test_find_largest_returns_the_largest_values(size):
    values = torch.randn(3, size).to(torch.bfloat16)
    found = values.gather(1, gemm._find_largest(values, 16))
    assert torch.equal(found.sort(-1).values, values.topk(min(16, size)).values.sort(-1).values)


def test_split_float32_thirds_add_up_to_weight():
    weight = torch.randn(7, 300) * torch.logspace(-12, 12, 300)
    thirds = split_float32(weight)
    assert thirds.dtype == torch.bfloat16
    assert torch.equal(thirds.double().view(3, 7, 300).sum(0), weight.double())
