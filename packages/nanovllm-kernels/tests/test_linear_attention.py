"""Tests the plain torch implementation of Gated DeltaNet against a float64 recurrence, token by token."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL, copy_states, gated_delta_net, plan_states


def recur(case):
    """Return results, states by slot, and convolution inputs by slot and position."""
    _, num_v_heads, v_dim, k_dim = case.recurrent.shape
    width, channels = case.conv.shape[1:]
    num_k_heads = (channels - num_v_heads * v_dim) // (2 * k_dim)
    group = num_v_heads // num_k_heads
    weights = [part.double() for part in case.weights[:4]]
    conv_weight, decay, dt_bias, norm = weights
    outs, states, inputs = [], {}, {}
    token = 0
    for (count, length), slot, checkpoints in zip(case.counts_and_lengths, case.slots, case.checkpoints, strict=True):
        state = torch.zeros(case.recurrent.shape[1:], dtype=torch.double)
        if length > count:
            state = case.recurrent[slot].double()
        seen = {at: case.conv[slot, at % width] for at in range(max(0, length - count - width + 1), length - count)}
        for position in range(length - count, length):
            row = case.qkvz[token].view(num_k_heads, -1)
            seen[position] = row[:, : channels // num_k_heads].flatten()
            taps = [seen.get(position - width + 1 + tap, torch.zeros(channels)).double() for tap in range(width)]
            mixed = functional.silu((torch.stack(taps) * conv_weight).sum(0)).view(num_k_heads, -1)
            b, a = case.ba[token].double().view(num_k_heads, 2, group).unbind(1)
            z = row[:, channels // num_k_heads :].double()
            head_outs = []
            for head in range(num_v_heads):
                k_head, index = divmod(head, group)
                q, k, values = mixed[k_head].split((k_dim, k_dim, group * v_dim))
                q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
                v = values.view(group, v_dim)[index]
                decay_factor = torch.exp(-decay[head] * functional.softplus(a[k_head, index] + dt_bias[head]))
                old = state[head] * decay_factor
                state[head] = old + torch.outer((v - old @ k) * b[k_head, index].sigmoid(), k)
                o = state[head] @ (q * k_dim**-0.5)
                o = o / (o.square().mean() + case.weights.eps).sqrt() * norm
                head_outs.append(o * functional.silu(z[k_head].view(group, v_dim)[index]))
            outs.append(torch.cat(head_outs))
            token += 1
            for end, saved_slot in (*checkpoints, (length, slot)):
                if end == position + 1:
                    states[saved_slot] = state.clone()
                    inputs[saved_slot] = {p: seen[p] for p in range(max(0, end - width + 1), end)}
    return torch.stack(outs), states, inputs


COUNTS_AND_LENGTHS = {
    "decodes": [(1, 1), (1, 2), (1, 7), (1, 64), (1, 128), (1, 65)],
    "prompts": [(5, 5), (64, 64), (63, 63), (65, 65), (2, 2), (130, 130)],
    "chunks at odd offsets": [(1, 200), (3, 66), (100, 137), (60, 63), (2, 64), (200, 261)],
    "mixed": [(1, 1), (1, 64), (1, 90), (70, 140), (3, 3)],
}


def check(case, **tolerances):
    outs, states, inputs = recur(case)
    recurrent, conv = case.recurrent.clone(), case.conv.clone()
    found = gated_delta_net(case.qkvz, case.ba, case.weights, recurrent, conv, case.plan("torch"))
    assert found.dtype == case.qkvz.dtype
    torch.testing.assert_close(found.double(), outs, **tolerances)
    for slot in range(len(recurrent)):
        if slot not in states:
            assert torch.equal(recurrent[slot].nan_to_num(7), case.recurrent[slot].nan_to_num(7))
            assert torch.equal(conv[slot].nan_to_num(7), case.conv[slot].nan_to_num(7))
            continue
        torch.testing.assert_close(recurrent[slot].double(), states[slot], **tolerances)
        for position, row in inputs[slot].items():
            assert torch.equal(conv[slot, position % conv.shape[1]], row)


@pytest.mark.parametrize("counts_and_lengths", COUNTS_AND_LENGTHS.values(), ids=COUNTS_AND_LENGTHS.keys())
@pytest.mark.parametrize(
    ("heads", "dims", "width"), [((2, 4), (16, 16), 4), ((1, 3), (8, 24), 2), ((2, 2), (24, 8), 5)]
)
def test_chunks_match_token_by_token_recurrence(counts_and_lengths, heads, dims, width, state_case):
    check(state_case(counts_and_lengths, heads=heads, dims=dims, width=width), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("counts_and_lengths", [COUNTS_AND_LENGTHS["mixed"]])
def test_bf16_states_match_float64(counts_and_lengths, state_case):
    case = state_case(counts_and_lengths, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    check(case, atol=2e-2, rtol=2e-2)


def test_continuing_from_saved_state_matches_whole_prompt(state_case):
    whole = state_case([(200, 200)])
    (position, slot), (_, later_slot) = whole.checkpoints[0]
    assert position == 2 * CHECKPOINT_INTERVAL
    recurrent, conv = whole.recurrent.clone(), whole.conv.clone()
    expected = gated_delta_net(whole.qkvz, whole.ba, whole.weights, recurrent, conv, whole.plan("torch"))
    rest = replace(
        whole,
        qkvz=whole.qkvz[position:],
        ba=whole.ba[position:],
        counts_and_lengths=[(200 - position, 200)],
        slots=[slot],
        checkpoints=[[(192, 1)]],
    )
    found = gated_delta_net(rest.qkvz, rest.ba, rest.weights, recurrent, conv, rest.plan("torch"))
    torch.testing.assert_close(found, expected[position:], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(recurrent[slot], recurrent[whole.slots[0]], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(recurrent[1], recurrent[later_slot], atol=1e-6, rtol=1e-6)


def test_torch_backend_without_num_decodes_is_rejected():
    ones = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_decodes"):
        plan_states(
            ones,
            torch.zeros(1, 1, 2, dtype=torch.int32),
            ones,
            torch.tensor([0, 1], dtype=torch.int32),
            num_decodes=None,
            max_query_len=1,
            num_tokens=1,
            backend="torch",
        )


def test_state_copies_happen_in_order():
    states = torch.arange(24.0).view(2, 4, 3)
    before = states.clone()
    copy_states(states, torch.tensor([1, 3, 0]), torch.tensor([0, 1, 2]))
    assert torch.equal(states, before[:, [1, 3, 1, 3]])
