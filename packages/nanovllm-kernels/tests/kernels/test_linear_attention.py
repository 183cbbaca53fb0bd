"""Tests the kernels of Gated DeltaNet against plain torch."""

from dataclasses import replace

import pytest
import torch
from interpreted_samples import sample_product

from nanovllm_kernels.linear_attention import gated_delta_net, linear_attention_reference

OPS = torch.ops.nanovllm

TOLERANCE = {torch.float32: {"atol": 3e-5, "rtol": 3e-5}, torch.float16: {"atol": 1e-2, "rtol": 1e-2}} | {
    torch.bfloat16: {"atol": 6e-2, "rtol": 6e-2}
}


def check_close(found, expected, tolerance):
    if isinstance(tolerance, dict):
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
        return
    assert torch.equal(found.isnan(), expected.isnan())
    difference, expected = (found - expected).nan_to_num(0), expected.nan_to_num(0)
    assert difference.norm() <= tolerance * expected.norm()


def check(case, *, knows_decodes, tolerance):
    exact = replace(case, qkvz=case.qkvz.float(), ba=case.ba.float(), recurrent=case.recurrent.float())
    expected_states, expected_conv = exact.recurrent.clone(), case.conv.float().clone()
    expected = gated_delta_net(exact.qkvz, exact.ba, case.weights, expected_states, expected_conv, exact.plan("torch"))
    recurrent, conv = case.recurrent.clone(), case.conv.clone()
    found = gated_delta_net(
        case.qkvz, case.ba, case.weights, recurrent, conv, case.plan("triton", knows_decodes=knows_decodes)
    )
    assert found.dtype == case.qkvz.dtype
    check_close(found.float(), expected, tolerance)
    check_close(recurrent.float(), expected_states, tolerance)
    width = conv.shape[1]
    for (count, length), slot, checkpoints in zip(case.counts_and_lengths, case.slots, case.checkpoints, strict=True):
        for end, saved_slot in (*checkpoints, (length, slot)) if count else ():
            conv_rows = torch.arange(max(0, end - width + 1), end, device=conv.device) % width
            assert torch.equal(conv[saved_slot, conv_rows].float(), expected_conv[saved_slot, conv_rows])


COUNTS_AND_LENGTHS = {
    "decodes": [(1, 1), (1, 2), (1, 64), (1, 65), (1, 128)],
    "prompts and rows without a token": [(65, 65), (0, 0), (2, 2), (0, 7), (64, 64)],
    "chunks at odd offsets": [(3, 66), (100, 137), (2, 64), (5, 193), (190, 261)],
    "mixed": [(1, 1), (1, 64), (1, 90), (70, 140), (3, 3)],
}


@pytest.mark.parametrize(("name", "knows_decodes"), sample_product(COUNTS_AND_LENGTHS, [True, False]))
def test_float32_matches_reference(name, knows_decodes, state_case, device):
    check(
        state_case(COUNTS_AND_LENGTHS[name], heads=(1, 2), device=device),
        knows_decodes=knows_decodes,
        tolerance=TOLERANCE[torch.float32],
    )


@pytest.mark.parametrize(
    ("heads", "dims", "width"), [((1, 3), (8, 24), 2), ((2, 2), (24, 40), 5)], ids=["narrow", "wide"]
)
def test_heads_of_any_size_match_reference(heads, dims, width, state_case, device):
    case = state_case(COUNTS_AND_LENGTHS["mixed"], heads=heads, dims=dims, width=width, device=device)
    check(case, knows_decodes=False, tolerance=TOLERANCE[torch.float32])


@pytest.mark.parametrize("block_rows", [8, 16])
def test_states_in_blocks_of_rows_match_reference(block_rows, state_case, device, monkeypatch):
    from nanovllm_kernels.linear_attention import triton_decode

    monkeypatch.setattr(triton_decode, "INTERPRETER_SMS", 0)
    monkeypatch.setattr(triton_decode, "BLOCK_ROWS_BY_BYTES", {4: block_rows})
    for dims in ((16, 16), (8, 24), (24, 40)):
        case = state_case([*COUNTS_AND_LENGTHS["decodes"], *[(1, 70)] * 3], heads=(1, 2), dims=dims, device=device)
        check(case, knows_decodes=True, tolerance=TOLERANCE[torch.float32])


def check_16_bits(dtype, state_dtype, state_case, device):
    case = state_case(COUNTS_AND_LENGTHS["mixed"], dtype=dtype, state_dtype=state_dtype, device=device)
    check(case, knows_decodes=False, tolerance=TOLERANCE[torch.bfloat16 if state_dtype == torch.bfloat16 else dtype])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_float16_matches_reference(state_dtype, state_case, device):
    check_16_bits(torch.float16, state_dtype, state_case, device)


# Triton's interpreter does not multiply bf16 matrices.
@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_matches_reference(state_dtype, state_case, device):
    check_16_bits(torch.bfloat16, state_dtype, state_case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_sized_layer_matches_reference(dtype, state_case, device):
    counts_and_lengths = [*[(1, 100 + 9 * request) for request in range(40)], (3000, 5000), (700, 700), (64, 1000)]
    case = state_case(counts_and_lengths, heads=(16, 32), dims=(128, 128), dtype=dtype, device=device)
    # A few of the many bf16 values have large errors, so compare norms.
    check(case, knows_decodes=False, tolerance={"atol": 1e-3, "rtol": 1e-3} if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
def test_one_captured_graph_serves_any_lengths(state_case, device):
    case = state_case([(1, 70), (1, 1), (60, 64), (2, 2)], device=device)
    later = state_case([(60, 200), (2, 2), (1, 64), (1, 9)], device=device)
    batch, later_batch = (each.plan("triton", knows_decodes=False) for each in (case, later))
    recurrent, conv = case.recurrent.clone(), case.conv.clone()
    gated_delta_net(case.qkvz, case.ba, case.weights, recurrent, conv, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gated_delta_net(case.qkvz, case.ba, case.weights, recurrent, conv, batch)
    for target, source in (
        (case.qkvz, later.qkvz),
        (case.ba, later.ba),
        (recurrent, later.recurrent),
        (conv, later.conv),
        (batch.slots, later_batch.slots),
        (batch.checkpoints, later_batch.checkpoints),
        (batch.seq_lens, later_batch.seq_lens),
        (batch.query_start_loc, later_batch.query_start_loc),
    ):
        target.copy_(source)
    graph.replay()
    states = later.recurrent.clone()
    expected = gated_delta_net(later.qkvz, later.ba, case.weights, states, later.conv.clone(), later_batch)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(recurrent, states, equal_nan=True)


def check_copies(states, copies):
    sources, targets = torch.tensor(copies, dtype=torch.int64, device=states.device).view(-1, 2).t().contiguous()
    expected = states.clone()
    linear_attention_reference.copy_states(expected, sources, targets)
    OPS.copy_states(states, sources, targets)
    assert torch.equal(states, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 24), (5, 33, 31)])
def test_state_copies_happen_in_order(dtype, shape, device):
    states = torch.randn(3, 6, *shape).to(device, dtype)
    for copies in ([], [(0, 0)], [(2, 5)], [(1, 2), (2, 3), (3, 1)], [(4, 0), (1, 4), (2, 1), (0, 2), (5, 3)]):
        check_copies(states, copies)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_state_copies_allocate_no_memory(dtype, device):
    """The tensor has more than 2^31 elements."""
    states = torch.zeros((2, 2200, 32, 128, 128), dtype=dtype, device=device)
    states.view(2, 2200, -1)[:, :, :2] = torch.arange(4400, device=device).view(2, 2200, 1)
    states.view(2, 2200, -1)[:, :, -1] = 1
    order = torch.randperm(2200)
    sources, targets = order[:1000].to(device), order[1000:2000].to(device)
    expected = states[:, :, 0, 0, :2].clone()
    expected[:, targets] = expected[:, sources]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    OPS.copy_states(states, sources, targets)
    assert torch.cuda.max_memory_allocated() == before
    assert torch.equal(states[:, :, 0, 0, :2], expected)
    assert bool((states.view(2, 2200, -1)[:, :, -1] == 1).all())
