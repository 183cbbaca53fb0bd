"""Tests that drafts change no bit of the states of Gated DeltaNet."""

from dataclasses import replace

import pytest
import torch
from draft_traces import DraftTraces, LayerCache, LayerShape, TraceSettings, make_tokens, make_weights

from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL, StateBatch, gated_delta_net, plan_states

SMALL = TraceSettings(
    num_traces=3,
    num_steps=4,
    prompt_lens=(0, CHECKPOINT_INTERVAL - 1),
    shape=LayerShape(num_k_heads=1, num_v_heads=2, k_dim=8, v_dim=12),
    backend="triton",
)
LARGE = replace(SMALL, num_steps=11, prompt_lens=(0, 63, 64, 130), shape=LayerShape(4, 8, 128, 128), max_drafts=5)


@pytest.mark.parametrize(("splits_states_by_rows", "max_drafts", "seed"), [(False, 2, 10), (True, 1, 16)])
def test_drafts_change_no_bit(splits_states_by_rows, max_drafts, seed, device, monkeypatch):
    """With these seeds, one step fills the ring of a request."""
    from nanovllm_kernels.linear_attention import triton_decode

    if splits_states_by_rows:
        monkeypatch.setattr(triton_decode, "INTERPRETER_SMS", 0)
        monkeypatch.setattr(triton_decode, "BLOCK_ROWS_BY_BYTES", {4: 8})
    # The GPU kernel for caches without a ring may add in another order.
    settings = replace(SMALL, max_drafts=max_drafts, device=device, plain_has_ring=device != "cpu")
    num_drafts, num_accepted, num_restarts = DraftTraces(settings, seed).run()
    assert num_drafts >= num_accepted > 0
    assert num_restarts > 0


def make_cache(backend: str, device: str) -> LayerCache:
    settings = replace(SMALL, backend=backend, device=device)
    cache = LayerCache(settings, make_weights(SMALL.shape, torch.Generator().manual_seed(0)), 4, 5, max_drafts=2)
    cache.states.zero_()
    cache.conv_states.zero_()
    return cache


def run_steps(cache: LayerCache) -> list[torch.Tensor]:
    generator, requests = torch.Generator().manual_seed(1), torch.arange(4)
    outs = []
    for query_lens, num_accepted in (([3, 1, 0, 2], [1, 0, 0, 1]), ([2, 3, 1, 3], [1, 2, 0, 0])):
        lens, accepted = torch.tensor(query_lens), torch.tensor(num_accepted)
        outs.append(cache.run(requests, make_tokens(SMALL.shape, (sum(query_lens),), generator), lens, has_drafts=True))
        has_tokens = lens > 0
        cache.reject(requests[has_tokens], lens[has_tokens], accepted[has_tokens])
    tokens, lens = make_tokens(SMALL.shape, (4,), generator), torch.ones(4, dtype=torch.long)
    num_decodes = 4 if cache.settings.backend == "torch" else None
    outs.append(cache.run(requests, tokens, lens, num_decodes=num_decodes))
    return outs


def test_drafts_match_reference(device):
    expected_cache, cache = make_cache("torch", "cpu"), make_cache("triton", device)
    expected, found = run_steps(expected_cache), run_steps(cache)
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(cache.states.cpu(), expected_cache.states, atol=3e-5, rtol=3e-5)
    assert torch.equal(cache.conv_states.cpu(), expected_cache.conv_states)


@pytest.mark.gpu
def test_one_captured_graph_serves_any_numbers_of_drafts(device):
    generator = torch.Generator().manual_seed(3)
    caches = [make_cache("triton", device) for _ in range(2)]
    tokens = make_tokens(SMALL.shape, (9,), generator).to(device)
    qkvz, ba = tokens[:, :-4], tokens[:, -4:]

    def as_int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def plan(query_lens: list[int], seq_lens: list[int], num_pending: list[int]) -> StateBatch:
        return plan_states(
            as_int32([1, 2, 3, 0]),
            torch.zeros((4, 1, 2), dtype=torch.int32, device=device),
            as_int32(seq_lens),
            as_int32([sum(query_lens[:index]) for index in range(5)]),
            num_decodes=None,
            max_query_len=3,
            num_tokens=9,
            backend="triton",
            num_pending=as_int32(num_pending),
            has_drafts=True,
        )

    batch, later = plan([3, 3, 3, 0], [70, 80, 90, 0], [0, 0, 0, 0]), plan([1, 3, 2, 0], [71, 83, 92, 0], [2, 0, 1, 0])
    for cache in caches:
        gated_delta_net(qkvz, ba, cache.weights, cache.states, cache.conv_states, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gated_delta_net(qkvz, ba, caches[0].weights, caches[0].states, caches[0].conv_states, batch)
    for name in ("seq_lens", "query_start_loc", "num_pending"):
        getattr(batch, name).copy_(getattr(later, name))
    graph.replay()
    expected = gated_delta_net(qkvz, ba, caches[1].weights, caches[1].states, caches[1].conv_states, later)
    assert torch.equal(found[:6], expected[:6])
    assert torch.equal(caches[0].states, caches[1].states)
    assert torch.equal(caches[0].conv_states, caches[1].conv_states)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_traces", [8, 300])
def test_drafts_of_a_model_sized_layer_change_no_bit(num_traces, state_dtype, dtype, device):
    settings = replace(
        LARGE, num_traces=num_traces, dtype=dtype, state_dtype=state_dtype, device=device, plain_has_ring=True
    )
    num_drafts, num_accepted, _ = DraftTraces(settings, seed=0).run()
    assert num_drafts > num_accepted > num_traces
