"""Tests that drafts change no bit of the states of Gated DeltaNet, in Triton."""

from dataclasses import replace

import pytest
import torch
from draft_traces import DraftTraces, LayerShape, TraceSettings

from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

SMALL = TraceSettings(
    num_traces=3,
    num_steps=4,
    prompt_lens=(0, CHECKPOINT_INTERVAL - 1),
    shape=LayerShape(num_k_heads=1, num_v_heads=2, k_dim=8, v_dim=12),
    backend="triton",
)
LARGE = replace(SMALL, num_steps=11, prompt_lens=(0, 63, 64, 130), shape=LayerShape(4, 8, 128, 128), max_drafts=5)


@pytest.mark.parametrize(("has_blocks", "max_drafts", "seed"), [(False, 2, 10), (True, 1, 16)])
def test_drafts_change_no_bit(has_blocks, max_drafts, seed, device, monkeypatch):
    """has_blocks: use the launch for many requests, which divides states into blocks of rows.

    With these seeds, a request has `max_drafts` pending tokens and drafts in one step, so that one row of the ring less
    would fail.
    """
    from nanovllm_kernels.linear_attention import triton_decode

    if has_blocks:
        monkeypatch.setattr(triton_decode, "INTERPRETER_SMS", 0)
        monkeypatch.setattr(triton_decode, "BLOCK_ROWS_BY_BYTES", {4: 8})
    # On a GPU, the kernel for caches without drafts may add in another order.
    settings = replace(SMALL, max_drafts=max_drafts, device=device, plain_has_ring=device != "cpu")
    num_drafts, num_accepted, num_restarts = DraftTraces(settings, seed).run()
    assert num_drafts >= num_accepted > 0
    assert num_restarts > 0


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
