"""Tests the plain torch sampler against sorting loops in float64, and against statistics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_kernels.sampling import (
    IN_PROMPT_BIT,
    DrawSettings,
    apply_bias_,
    apply_masks_,
    apply_penalties,
    compute_logprobs,
    compute_ranks,
    forbid_sequences_,
    noise,
    sample,
    sampling_reference,
)


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    num_rows = logits.shape[0]

    def by_row(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()

    return sample(
        logits,
        DrawSettings(
            by_row(temperature, torch.float32),
            by_row(top_k, torch.int32),
            by_row(top_p, torch.float32),
            by_row(min_p, torch.float32),
            torch.arange(num_rows) if seeds is None else seeds,
        ),
        by_row(0 if positions is None else positions, torch.int64),
        all_greedy=False,
        any_filter=top_k > 0 or top_p < 1 or min_p > 0,
    )


def kept_naively(logits, top_k, top_p, min_p):
    is_kept = torch.ones_like(logits, dtype=torch.bool)
    if top_k:
        is_kept = logits >= logits.sort(descending=True).values[min(top_k, len(logits)) - 1]
    p = logits.double().masked_fill(~is_kept, -math.inf).softmax(-1)
    if top_p < 1:
        # The margin covers rounding of sums that equal top_p.
        enough = [t for t in p.unique().tolist() if p[p >= t].sum() >= top_p - 1e-9]
        is_kept &= p >= max(enough)
    is_kept &= p >= min_p * p.max() * (1 - 1e-6)
    return set(is_kept.nonzero().flatten().tolist())


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from([1, 7, 300]),
    top_k=st.sampled_from([0, 1, 3, 50, 500]),
    top_p=st.sampled_from([1.0, 0.93, 0.51, 0.013]),
    min_p=st.sampled_from([0.0, 0.11, 1.0]),
    coarse=st.booleans(),
    num_first=st.sampled_from([4, 128]),
)
def test_filters_match_their_definition(seed, vocab_size, top_k, top_p, min_p, coarse, num_first):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, generator=generator) * 2
    if coarse:
        logits = logits.round()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_reference, "NUM_FIRST_CANDIDATES", num_first)
        patch.setattr(sampling_reference, "NUM_TIE_CANDIDATES", 1)
        values, token_ids = sampling_reference.filter_row(logits, top_k, top_p, min_p)
    assert torch.equal(values, logits[token_ids])
    assert set(token_ids.tolist()) == kept_naively(logits, top_k, top_p, min_p)


def test_greedy_takes_lowest_id_of_equal_logits():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -math.inf, 0.0, -0.5]])
    for dtype in (torch.float32, torch.bfloat16):
        for temperature in (0.0, 1e-6):
            assert draw(logits.to(dtype), temperature=temperature).tolist() == [1, 0, 2]
        zeros, ones = torch.zeros(3), torch.ones(3)
        settings = DrawSettings(zeros, zeros.int(), ones, zeros, zeros.long())
        greedy = sample(logits.to(dtype), settings, zeros.long(), all_greedy=True, any_filter=False)
        assert (greedy.tolist(), greedy.dtype) == ([1, 0, 2], torch.int32)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9}])
def test_filtered_draws_ignore_nan_and_accept_infinite_logits(options):
    finite = torch.randn(20, 50)
    logits = finite.clone()
    logits[:, 7] = float("nan")
    assert (
        draw(logits, **options).tolist() == draw(finite.index_fill(1, torch.tensor(7), -torch.inf), **options).tolist()
    )
    logits[:, 9] = float("inf")
    assert draw(logits, **options).tolist() == [9] * 20
    # There is no right token, but the draw must not fail.
    assert all(0 <= token < 50 for token in draw(torch.full((2, 50), -torch.inf), **options).tolist())


def test_only_remaining_token_is_always_drawn():
    logits = torch.randn(200, 64)
    expected = logits.argmax(-1).tolist()
    assert draw(logits, top_k=1).tolist() == expected
    assert draw(logits, top_p=1e-6).tolist() == expected
    assert draw(logits, min_p=1.0).tolist() == expected
    one_allowed = torch.full_like(logits, -math.inf).scatter_(1, torch.tensor(expected).unsqueeze(1), 0.0)
    assert draw(one_allowed).tolist() == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("varied", ["seeds", "positions"])
def test_draws_follow_the_distribution(settings, varied):
    """The bound of Pearson's chi-square test is far above the values that chance gives."""
    num_draws = 4000 if settings.keys() & {"top_k", "top_p", "min_p"} else 40000
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    scaled = row / settings.get("temperature", 1.0)
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | {k: v for k, v in settings.items() if k != "temperature"}
    kept = sorted(kept_naively(scaled, **filters))
    expected = scaled[kept].double().softmax(-1) * num_draws
    numbers = torch.arange(num_draws) + 12345
    varying = {"seeds": numbers} if varied == "seeds" else {"seeds": torch.full_like(numbers, 7), "positions": numbers}

    drawn = draw(row.expand(num_draws, -1), **settings, **varying)

    observed = drawn.bincount(minlength=8).double()
    assert observed[kept].sum() == num_draws
    chi_square = ((observed[kept] - expected).square() / expected).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 10


def test_draw_does_not_depend_on_batch_or_row():
    logits = torch.randn(6, 500).to(torch.bfloat16)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0, 0.9])
    top_k = torch.tensor([0, 0, 20, 0, 0, 7], dtype=torch.int32)
    seeds, positions = torch.tensor([5, 5, 6, -7, 2**62, 0]), torch.tensor([0, 9, 1, 1, 4000, 3])
    settings = DrawSettings(temperature, top_k, torch.ones(6), torch.zeros(6), seeds)
    together = sample(logits, settings, positions, all_greedy=False, any_filter=True)
    for order in ([0], [1], [5, 2], [3, 4, 0, 1, 2, 5]):
        row_settings = DrawSettings(*(setting[order] for setting in settings))
        filtered = bool((top_k[order] > 0).any())
        alone = sample(logits[order], row_settings, positions[order], all_greedy=False, any_filter=filtered)
        assert alone.tolist() == together[order].tolist()


def test_draw_does_not_depend_on_block_size(monkeypatch):
    logits = torch.randn(10, 300)
    whole = draw(logits)
    monkeypatch.setattr(sampling_reference, "DRAW_ELEMENTS", 700)
    assert torch.equal(draw(logits), whole)


def test_noise_is_uniform_and_bounded():
    first, second = noise.derive_row_keys(torch.tensor([0, 1]), torch.tensor([0, 0]))
    bits = noise.hash_tokens(torch.arange(200_000, dtype=torch.int32), first[:, None], second[:, None])
    uniform = -noise.draw_negative_exponentials(bits).double().expm1()
    for row in uniform:
        counts = row.histc(100, 0, 1)
        assert (counts - 2000).square().sum() / 2000 < 200
    correlation = torch.corrcoef(torch.stack((*uniform, uniform[0].roll(1))))
    assert (correlation - torch.eye(3)).abs().max() < 0.01
    extremes = torch.tensor([0, -1, 0x7FFFFFFF, -0x80000000, 0x7FFFFF7F], dtype=torch.int32)
    bounded = -noise.draw_negative_exponentials(extremes)
    assert (bounded > 0).all()
    assert (bounded < 17).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_match_their_definition(dtype):
    logits = torch.randn(3, 20).to(dtype)
    before = logits.clone()
    counts = torch.zeros((5, 20), dtype=torch.int32)
    counts[2, 3], counts[2, 4], counts[2, 5] = IN_PROMPT_BIT, IN_PROMPT_BIT + 2, 1
    counts[0, 7] = 3
    rows = torch.tensor([2, 0, 2], dtype=torch.int32)
    repetition, presence, frequency = torch.rand(5) + 0.5, torch.tensor([0.5, 0.1, 0.0, 0.2, 0.3]), torch.rand(5)
    out = apply_penalties(logits, rows, counts, repetition, presence, frequency)
    assert torch.equal(logits, before)
    assert out.dtype == torch.float32
    for b, row in enumerate(rows.tolist()):
        for token in range(20):
            value, count = float(logits[b, token]), int(counts[row, token])
            num_generated = count % IN_PROMPT_BIT
            if count:
                value = value / float(repetition[row]) if value > 0 else value * float(repetition[row])
            value -= float(presence[row]) * (num_generated > 0) + float(frequency[row]) * num_generated
            assert float(out[b, token]) == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_rows_without_penalties_keep_their_logits():
    logits = torch.randn(3, 20)
    logits[0, 3], logits[1, 4] = -math.inf, 0.0
    counts = torch.randint(-(2**31), 2**31, (3, 20)).to(torch.int32)
    zeros = torch.zeros(3)
    out = apply_penalties(logits, torch.arange(3, dtype=torch.int32), counts, torch.ones(3), zeros, zeros)
    assert torch.equal(out, logits)


def test_bias_applies_until_its_position():
    logits = torch.randn(2, 10)
    rows = torch.tensor([1, 0], dtype=torch.int32)
    ids = torch.tensor([[3, 3, 9, 0], [0, 5, 0, 0]], dtype=torch.int32)
    values = torch.tensor([[1.0, 2.0, -math.inf, 5.0], [0.25, -math.inf, 7.0, 7.0]])
    until = torch.tensor([[100, 8, 8, 0], [100, 7, 0, 0]], dtype=torch.int32)
    expected = logits.clone()
    expected[0, 0] += 0.25
    expected[1, 3] += 3
    expected[1, 9] = -math.inf
    apply_bias_(logits, rows, torch.tensor([7, 7]), ids, values, until)
    torch.testing.assert_close(logits, expected)


def pack_masks(allowed: torch.Tensor) -> torch.Tensor:
    """Pack bools [M, V] into bit masks."""
    masks = torch.zeros((allowed.shape[0], -(-allowed.shape[1] // 32)), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        masks[row, token // 32] |= 1 << (token % 32)
    return masks.to(torch.int32)


@pytest.mark.parametrize("vocab_size", [32, 45, 100])
def test_masks_forbid_tokens(vocab_size):
    logits = torch.randn(4, vocab_size)
    logits[3, :3] = -math.inf
    allowed = torch.rand(2, vocab_size) < 0.3
    allowed[1, 0] = True
    masks = torch.cat((pack_masks(allowed), torch.zeros_like(pack_masks(allowed[:1]))))
    out = logits.clone()
    apply_masks_(out, torch.tensor([1, 3, -1], dtype=torch.int32), masks)
    expected = logits.clone()
    expected[1, ~allowed[0]] = expected[3, ~allowed[1]] = -math.inf
    expected[3, 0] = out[3, 0]
    kept = [0, 1, 2] if allowed[1, :3].all() else [index for index in range(3) if allowed[1, index]]
    expected[3, kept] = out[3, 0]
    assert torch.equal(out, expected)
    assert -math.inf < float(out[3, 0]) < -1e9


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 3},
        {"top_k": 60},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.5},
        {"temperature": 0.01, "top_k": 5, "top_p": 0.5},
    ],
)
def test_masked_tokens_are_never_drawn(settings):
    generator = torch.Generator().manual_seed(0)
    num_rows, vocab_size = 500, 64
    logits = torch.randn((num_rows, vocab_size), generator=generator) * 10
    allowed = torch.rand((num_rows, vocab_size), generator=generator) < torch.rand((num_rows, 1), generator=generator)
    allowed[torch.arange(num_rows), torch.randint(vocab_size, (num_rows,), generator=generator)] = True
    # In some rows, a bias forbids all tokens that the mask allows. The mask wins.
    logits[::10][allowed[::10]] = -math.inf
    apply_masks_(logits, torch.arange(num_rows, dtype=torch.int32), pack_masks(allowed))
    drawn = draw(logits, **settings).long()
    assert allowed[torch.arange(num_rows), drawn].all()


def test_tokens_that_complete_forbidden_sequences_are_forbidden():
    logits = torch.randn(4, 10)
    rows = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    tokens = torch.tensor([[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 0]], dtype=torch.int32)
    num_prompt = torch.tensor([2, 1], dtype=torch.int32)
    sequences = torch.tensor(
        [[[-1, -1, 9], [-1, 4, 8], [2, 3, 7], [-1, 3, 6]], [[-1, 8, 9], [6, 7, 1], [5, 6, 2], [-1, -1, -1]]],
        dtype=torch.int32,
    )
    expected = logits.clone()
    # Tokens of the four rows, with prompts in brackets: [5] 6 7; [1 2] 3 4; [5] 6 7 8 9; [1 2] 3.
    expected[0, 1] = -math.inf
    expected[1, [9, 8]] = -math.inf
    # In the last row, token 7 stays allowed, because the sequence 2 3 7 would begin in the prompt.
    expected[3, [9, 6]] = -math.inf
    forbid_sequences_(logits, rows, torch.tensor([3, 4, 5, 3]), tokens, num_prompt, sequences)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_match_log_softmax(num_top):
    logits = (torch.randn(4, 100) * 3).to(torch.bfloat16)
    tokens = torch.tensor([0, 99, 5, 5], dtype=torch.int32)
    result = compute_logprobs(logits, tokens, num_top)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(result.chosen.double(), expected[range(4), tokens.long()], atol=1e-5, rtol=0)
    best = expected.topk(num_top).values
    torch.testing.assert_close(result.top_logprobs.double(), best, atol=1e-5, rtol=0)
    torch.testing.assert_close(expected.gather(1, result.top_ids.long()), best)
    assert result.top_ids.dtype == torch.int32


def test_ranks_match_sorted_order():
    logits = torch.randn(4, 100)
    tokens = torch.tensor([0, 99, 5, 7], dtype=torch.int32)
    logits[2, 5] = 100.0
    logits[3, [6, 7, 8]] = -100.0
    found = compute_ranks(logits, tokens)
    order = logits.argsort(-1, descending=True).tolist()
    assert found.tolist()[:3] == [order[row].index(token) + 1 for row, token in enumerate(tokens.tolist()[:3])]
    # Tokens with equal logits have the rank of the last such token.
    assert found.tolist()[2:] == [1, 100]
    assert found.dtype == torch.int32
