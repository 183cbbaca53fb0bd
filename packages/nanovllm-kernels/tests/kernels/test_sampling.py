"""Tests that the sampling kernels draw the same tokens as the plain torch reference on the CPU."""

import itertools
import math

import pytest
import torch
from interpreted_samples import sample_product

from nanovllm_kernels.sampling import IN_PROMPT_BIT, DrawSettings, sampling_reference, triton_sample

OPS = torch.ops.nanovllm


def settings_of(num_rows, device):
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.0, 1.5, 1.0, 0.8]).repeat(num_rows)[:num_rows]
    top_k = torch.tensor([0, 1, 20, 0, 5, 10**6], dtype=torch.int32).repeat(num_rows)[:num_rows]
    top_p = torch.tensor([1.0, 0.9, 0.5, 1.0, 0.1]).repeat(num_rows)[:num_rows]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.05]).repeat(num_rows)[:num_rows]
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    positions = torch.randint(0, 2**17, (num_rows,))
    return [tensor.to(device) for tensor in (temperature, top_k, top_p, min_p, seeds, positions)]


def sample_on_cpu(logits, settings, all_greedy, any_filter):
    *draw_settings, positions = (tensor.cpu() for tensor in settings)
    return sampling_reference.sample(logits.cpu(), DrawSettings(*draw_settings), positions, all_greedy, any_filter)


def check_sample(num_rows, vocab_size, dtype, device, max_wrong=0):
    logits = (torch.randn(num_rows, vocab_size) * 3).to(device, dtype)
    settings = settings_of(num_rows, device)
    for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
        actual = OPS.sample(logits, *settings, all_greedy, any_filter)
        expected = sample_on_cpu(logits, settings, all_greedy, any_filter)
        assert actual.dtype == torch.int32
        num_wrong = int((actual.cpu() != expected).sum())
        assert num_wrong <= max_wrong, (all_greedy, any_filter, actual, expected)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(5, torch.float32), (10_000, torch.float32), (3000, torch.bfloat16)])
def test_draws_match_reference(device, vocab_size, dtype):
    torch.manual_seed(vocab_size)
    check_sample(14, vocab_size, dtype, device)


def test_ties_at_thresholds_are_kept(device):
    torch.manual_seed(1)
    settings = settings_of(40, device)
    logits = torch.randn(40, 60, device=device).mul_(2).round_()
    for _ in range(2):
        actual = OPS.sample(logits, *settings, False, True)
        expected = sample_on_cpu(logits, settings, False, True)
        assert torch.equal(actual.cpu(), expected)
        logits[:, 3:] = -math.inf


LOGITS = {
    "flat": lambda *shape: torch.zeros(shape),
    "nearly flat": lambda *shape: torch.randn(shape) * 0.01,
    "ties": lambda *shape: torch.randint(0, 3, shape).float(),
    "normal": lambda *shape: torch.randn(shape),
    "steep": lambda *shape: torch.randn(shape) * 30,
    "one allowed": lambda *shape: torch.full(shape, -math.inf).index_fill_(1, torch.tensor(shape[1] - 2), -3.0),
    "clustered": lambda *shape: torch.cat((torch.randn(shape[0], 40) + 9, torch.randn(shape[0], shape[1] - 40)), 1),
}


@pytest.mark.parametrize(("kind", "max_segments"), sample_product(LOGITS, [4, 32]))
def test_filters_on_any_logits_match_reference(device, monkeypatch, kind, max_segments):
    for name, size in {
        "CHUNK_TOKENS": 256,
        "SEGMENT_TOKENS": 16,
        "MAX_CANDIDATE_SEGMENTS": max_segments,
        "ROW_BLOCK_TOKENS": 256,
    }.items():
        monkeypatch.setattr(triton_sample, name, size)
    torch.manual_seed(len(kind))
    vocab_size = 1003
    filters = list(itertools.product((0, 1, 300, 1003), (1.0, 0.6, 0.0), (0.0, 0.03)))
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*filters, strict=True))
    num_rows = len(filters)
    temperature = torch.tensor([1.0, 0.6, 0.0, 1.3, 0.8])[torch.arange(num_rows) % 5]
    seeds, positions = torch.arange(num_rows), torch.arange(num_rows) % 7
    settings = [tensor.to(device) for tensor in (temperature, top_k.int(), top_p, min_p, seeds, positions)]
    # Rows are unaligned, and the elements between rows must not be drawn.
    padded = torch.full((num_rows, vocab_size + 2), 1e4)
    padded[:, :vocab_size] = LOGITS[kind](num_rows, vocab_size)
    logits = padded.to(device)[:, :vocab_size]

    actual = OPS.sample(logits, *settings, False, True)

    expected = sample_on_cpu(logits, settings, False, True)
    assert torch.equal(actual.cpu(), expected)
    # Rows without filters draw the same tokens with `any_filter=False`.
    no_filter = torch.tensor([not (0 < k < vocab_size or p < 1 or m > 0) for k, p, m in filters]) | (temperature == 0)
    unfiltered = OPS.sample(logits, *settings, False, False)
    assert torch.equal(unfiltered.cpu()[no_filter], expected[no_filter])


def test_rows_without_finite_logits_give_valid_ids(device):
    logits = torch.full((3, 3000), -math.inf, device=device)
    logits[0] = math.nan
    logits[2, 2999] = -1e30
    settings = settings_of(3, device)
    for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
        drawn = OPS.sample(logits, *settings, all_greedy, any_filter)
        assert ((drawn >= 0) & (drawn < 3000)).all()
        assert drawn[2] == 2999


def test_penalties_match_reference(device):
    logits = torch.randn(3, 2500, device=device).to(torch.bfloat16)
    counts = torch.randint(0, 4, (5, 2500), device=device, dtype=torch.int32)
    counts += torch.randint(0, 2, counts.shape, device=device, dtype=torch.int32) * IN_PROMPT_BIT
    rows = torch.tensor([4, 0, 4], dtype=torch.int32, device=device)
    penalties = [torch.rand(5, device=device) + 0.5 for _ in range(3)]
    arguments = (logits, rows, counts, *penalties)
    torch.testing.assert_close(OPS.apply_penalties(*arguments), sampling_reference.apply_penalties(*arguments))


def test_rows_without_penalties_keep_their_logits(device):
    logits = torch.randn(4, 2500, device=device)
    logits[:, 7] = -math.inf
    counts = torch.randint(-(2**31), 2**31, (4, 2500), device=device).to(torch.int32)
    counts[1:] &= IN_PROMPT_BIT | 3
    rows = torch.arange(4, dtype=torch.int32, device=device)
    columns = torch.tensor([[1.0, 1.3, 1.0, 1.0], [0.0, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 0.2]], device=device)
    out = OPS.apply_penalties(logits, rows, counts, *columns)
    assert torch.equal(out[0], logits[0])
    for row in (1, 2, 3):
        assert not torch.equal(out[row], logits[row])
    torch.testing.assert_close(out, sampling_reference.apply_penalties(logits, rows, counts, *columns))


def check_in_place(name, logits, *arguments, **tolerances):
    expected = logits.cpu()
    getattr(sampling_reference, f"{name}_")(expected, *(each.cpu() for each in arguments))
    getattr(OPS, name)(logits, *arguments)
    torch.testing.assert_close(logits.cpu(), expected, **(tolerances or {"atol": 0, "rtol": 0}))


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_bias_matches_reference(device, position_dtype):
    logits = torch.randn(3, 50, device=device)
    rows = torch.tensor([4, 0, 4], dtype=torch.int32, device=device)
    positions = torch.tensor([10, 20, 90], device=device).to(position_dtype)
    ids = torch.randint(0, 50, (5, 200), device=device, dtype=torch.int32)
    values = torch.randn(5, 200, device=device)
    values[:, ::50] = -math.inf
    until = torch.randint(0, 100, (5, 200), device=device, dtype=torch.int32)
    check_in_place("apply_bias", logits, rows, positions, ids, values, until, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [50, 4100])
def test_masks_match_reference(device, vocab_size):
    logits = torch.randn(5, vocab_size, device=device)
    logits[:, ::7] = -math.inf
    # Bits after the vocabulary must not matter.
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32) + 2), device=device).to(torch.int32)
    masks[1, 1:] = 0
    mask_rows = torch.tensor([4, -1, 2], dtype=torch.int32, device=device)
    check_in_place("apply_masks", logits, mask_rows, masks[:, :-2])


@pytest.mark.gpu
def test_many_masks_match_reference(device):
    logits = torch.randn(256, 151_936, device=device)
    masks = torch.randint(-(2**31), 2**31, (200, 4748), device=device).to(torch.int32)
    mask_rows = torch.randperm(256, device=device)[:200].to(torch.int32)
    check_in_place("apply_masks", logits, mask_rows, masks)


@pytest.mark.parametrize(("num_sequences", "length"), [(3, 2), (200, 4), (5, 1)])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_forbidden_sequences_match_reference(device, num_sequences, length, position_dtype):
    torch.manual_seed(num_sequences)
    vocab_size, num_rows = 6, 7
    logits = torch.randn(9, vocab_size, device=device)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 6], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 1, 2, 10, 20, 20, 20, 19, 5], device=device).to(position_dtype)
    tokens = torch.randint(0, vocab_size, (num_rows, 21), device=device, dtype=torch.int32)
    num_prompt = torch.tensor([0, 1, 1, 3, 18, 20, 2], dtype=torch.int32, device=device)
    sequences = torch.randint(0, vocab_size, (num_rows, num_sequences, length), device=device, dtype=torch.int32)
    starts = torch.randint(0, length + 1, (num_rows, num_sequences, 1), device=device)
    sequences[torch.arange(length, device=device) < starts] = -1
    sequences[6] = -1
    before = logits.clone()
    check_in_place("forbid_sequences", logits, rows, positions, tokens, num_prompt, sequences)
    assert torch.equal(logits[8], before[8])
    assert bool(logits.isinf().any())


def test_rows_with_other_options_do_not_change_a_rows_draw(device):
    """Each row alone must draw the same token with only the operators that it needs."""
    torch.manual_seed(3)
    num_rows, vocab_size = 32, 3000
    logits = (torch.randn(num_rows, vocab_size) * 3).to(device)
    settings = settings_of(num_rows, device)
    rows = torch.randperm(num_rows).to(device, torch.int32)
    positions = torch.full((num_rows,), 9, dtype=torch.int32, device=device)
    penalised, biased, forbidding, masked = ((torch.arange(num_rows) >> bit) % 2 == 1 for bit in range(4))
    cpu_rows = rows.cpu().long()

    def table(is_used, values, off):
        out = torch.full_like(values, off)
        out[cpu_rows[is_used]] = values[cpu_rows[is_used]]
        return out.to(device)

    counts = torch.randint(0, 3, (num_rows, vocab_size), dtype=torch.int32).to(device)
    penalties = [table(penalised, torch.rand(num_rows) + 1.1, 1), *(table(penalised, torch.rand(num_rows), 0),) * 2]
    ids = torch.randint(0, vocab_size, (num_rows, 40), dtype=torch.int32).to(device)
    values = torch.randn(num_rows, 40).mul_(5).to(device)
    until = table(biased, torch.full((num_rows, 40), 100, dtype=torch.int32), 0)
    tokens = torch.randint(0, vocab_size, (num_rows, 20), dtype=torch.int32).to(device)
    num_prompt = torch.zeros(num_rows, dtype=torch.int32, device=device)
    best = logits.argmax(1).to(torch.int32).cpu()
    sequences = torch.full((num_rows, 2, 3), -1, dtype=torch.int32)
    sequences[cpu_rows, :, -1] = best[:, None]
    sequences = table(forbidding, sequences, -1)
    masks = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32))).to(device, torch.int32)
    mask_rows = torch.where(masked, torch.arange(num_rows), -1).to(device, torch.int32)

    def draw_with(selected, *, penalty, bias, forbid, mask, random):
        table_rows = rows[selected]
        out = logits[selected].clone()
        if penalty:
            out = OPS.apply_penalties(out, table_rows, counts, *penalties)
        if bias:
            OPS.apply_bias(out, table_rows, positions[selected], ids, values, until)
        if forbid:
            OPS.forbid_sequences(out, table_rows, positions[selected], tokens, num_prompt, sequences)
        if mask:
            OPS.apply_masks(
                out, torch.arange(len(mask_rows), device=device, dtype=torch.int32)[: len(out)], masks[selected]
            )
        return OPS.sample(out, *(each[selected] for each in settings), not random, random).tolist()

    out = OPS.apply_penalties(logits, rows, counts, *penalties)
    OPS.apply_bias(out, rows, positions, ids, values, until)
    OPS.forbid_sequences(out, rows, positions, tokens, num_prompt, sequences)
    OPS.apply_masks(out, mask_rows, masks)
    together = OPS.sample(out, *settings, False, True).tolist()
    for row in range(num_rows):
        rows_with_option = {"penalty": penalised, "bias": biased, "forbid": forbidding, "mask": masked}
        options = {name: bool(is_used[row]) for name, is_used in rows_with_option.items()}
        options["random"] = float(settings[0][row]) > 0
        assert draw_with(slice(row, row + 1), **options) == [together[row]], (row, options)
    assert together != OPS.sample(logits, *settings, False, True).tolist()


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_match_reference(device, num_top):
    logits = torch.randn(3, 9000, device=device) * 3
    logits[1, 4096:] = -math.inf
    tokens = torch.tensor([0, 4095, 8999], dtype=torch.int32, device=device)
    for actual, expected in zip(
        OPS.logprobs(logits, tokens, num_top), sampling_reference.compute_logprobs(logits, tokens, num_top), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 49152), (64, 151_936), (256, 128_256)])
def test_large_draws_match_reference(device, dtype, num_rows, vocab_size):
    torch.manual_seed(num_rows)
    # Rounding may change a draw if two tokens are nearly tied, or if a token is at the limit of top_p.
    check_sample(num_rows, vocab_size, dtype, device, max_wrong=num_rows // 32)


def test_noise_differs_by_less_than_max_distance_from_max():
    least, most = -math.log(-math.log1p(-(1 - 2**-24))), -math.log(2**-32)
    assert most - least < triton_sample.MAX_DISTANCE_FROM_MAX
