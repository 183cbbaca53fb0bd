"""Tests that drafts change no bit of the states of Gated DeltaNet, in plain torch."""

from dataclasses import replace

import pytest
import torch
from draft_traces import NUM_TAPS, DraftTraces, LayerCache, LayerShape, TraceSettings, make_tokens, make_weights

from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL, conv_state_shape

SETTINGS = TraceSettings(
    num_traces=1000, num_steps=11, prompt_lens=(0, CHECKPOINT_INTERVAL - 1, CHECKPOINT_INTERVAL, 130)
)


@pytest.mark.parametrize("seed", range(10))
def test_drafts_change_no_bit_of_states_and_results(seed):
    state_dtype = torch.float32 if seed % 2 == 0 else torch.bfloat16
    traces = DraftTraces(replace(SETTINGS, state_dtype=state_dtype), seed)
    num_drafts, num_accepted, num_restarts = traces.run()
    assert num_drafts > num_accepted > 4 * SETTINGS.num_traces
    assert num_restarts > SETTINGS.num_traces / 10


def run_once(cache: LayerCache, query_len: int, **options) -> None:
    tokens = make_tokens(LayerShape(), (query_len,), torch.Generator().manual_seed(0))
    cache.run(torch.tensor([0]), tokens, torch.tensor([query_len]), **options)


def make_cache(max_drafts: int) -> LayerCache:
    return LayerCache(SETTINGS, make_weights(LayerShape(), torch.Generator().manual_seed(0)), 1, 2, max_drafts)


def test_caches_without_drafts_have_one_row_per_tap():
    assert conv_state_shape(NUM_TAPS, 48, 1, 0) == (NUM_TAPS, 48)
    assert conv_state_shape(NUM_TAPS, 48, 1, 3) == (NUM_TAPS + 6, 50)


def test_wrong_caches_and_too_many_drafts_are_rejected():
    with pytest.raises(ValueError, match="has_drafts is set, but num_pending is None"):
        run_once(make_cache(0), 2, has_drafts=True)
    cache = make_cache(max_drafts=3)
    run_once(cache, 4, has_drafts=True)
    with pytest.raises(ValueError, match="5 tokens of a request, but the caches are for at most 3 drafts"):
        run_once(cache, 5, has_drafts=True)
    cache.has_ring = False
    with pytest.raises(ValueError, match="num_pending is None, but conv_states has 10 rows for 4 taps"):
        run_once(cache, 1, num_decodes=1)
    cache = make_cache(0)
    cache.has_ring = True
    with pytest.raises(ValueError, match="num_pending is set, but conv_states has 4 rows for 4 taps"):
        run_once(cache, 1, num_decodes=1)
