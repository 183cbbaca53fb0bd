"""Greedy tokens equal transformers' own, token for token, in float32, whatever the engine's settings.

The matrix is walked pairwise: every family meets every setting, and every two settings meet in some family.
"""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_models import llama, load

VOCAB = 131
NUM_PROMPTS, OUTPUT = 16, 32

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "GQA, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "MHA, untied": {"num_key_value_heads": 4},
    "MQA, llama3 scaling": {"num_key_value_heads": 1, "rope_parameters": LLAMA3_SCALING},
    "attention and MLP bias": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "head size of its own": {"num_key_value_heads": 2, "head_dim": 32},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 32},
}
CLASSES = {"Qwen2": (Qwen2Config, Qwen2ForCausalLM), "Qwen3": (Qwen3Config, Qwen3ForCausalLM)}
# One row a prompt, so that no graphs are captured that nobody needs.
PLENTY = {"num_blocks": 400, "max_num_seqs": NUM_PROMPTS}
# Room for two or three of the sixteen: every other one is preempted again and again.
SCARCE = {"num_blocks": 14, "max_model_len": 200, "max_num_seqs": NUM_PROMPTS}
SETTINGS = {
    "one at a time": {**PLENTY, "max_num_seqs": 1},
    "all at once": PLENTY,
    "all at once, depth 1, no prefix cache": {"depth": 1, "prefix_caching": False, **PLENTY},
    "chunked": {"max_num_batched_tokens": 40, **PLENTY},
    "chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, **PLENTY},
    "chunked, no prefix cache, pages of 32": {
        "max_num_batched_tokens": 48,
        "prefix_caching": False,
        "block_size": 32,
        **PLENTY,
    },
    "preempted": SCARCE,
    "preempted, chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, **SCARCE},
    "preempted, no prefix cache": {"prefix_caching": False, **SCARCE},
}

GPU_SETTINGS = {
    "neither compiled nor captured": {"compile": False, "graph_mode": "none", **PLENTY},
    "only decodes from graphs": {"graph_mode": "full_decode_only", "max_num_batched_tokens": 40, **PLENTY},
    "graphs, depth 1": {"depth": 1, **PLENTY},
    "not compiled": {"compile": False, **PLENTY},
    "compiled, launched kernel by kernel": {"compile": True, "graph_mode": "none", **PLENTY},
    "mixed steps in pieces": {"graph_mode": "piecewise", **PLENTY},
    "mixed steps in pieces, chunked": {"graph_mode": "piecewise", "max_num_batched_tokens": 80, **PLENTY},
}


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(64)]
    return [
        shared[: rng.choice([0, 20, 40])] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 50))]
        for _ in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory, reference_generate) -> tuple[Path, list[list[int]]]:
    """A tiny random model on disk, and what transformers makes of every prompt."""
    torch.manual_seed(list(FAMILIES).index(request.param))
    make_config, make_model = CLASSES.get(request.param, (LlamaConfig, LlamaForCausalLM))
    config = make_config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "initializer_range": 0.4,
            "eos_token_id": 2,
            **FAMILIES[request.param],
        }
    )
    model = make_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.normal_(1, 0.3)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    outputs = [reference_generate(model, prompt, OUTPUT) for prompt in prompts()]
    # A model that says the same thing whatever it is asked would prove nothing.
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
    assert len({token for output in outputs for token in output}) > 20
    return path, outputs


@pytest.mark.parametrize("settings", SETTINGS)
async def test_tokens_equal_transformers(checkpoint, settings, device):
    await check(checkpoint, device, SETTINGS[settings], preempted=settings.startswith("preempted"))


@pytest.mark.gpu
@pytest.mark.parametrize("settings", GPU_SETTINGS)
async def test_graphs_and_compiling_change_nothing(checkpoint, settings, monkeypatch):
    # Steps here have too few rows otherwise.
    monkeypatch.setattr(llama, "LEAST_ROWS", 9)
    await check(checkpoint, "cuda", GPU_SETTINGS[settings], preempted=False)


async def check(checkpoint: tuple[Path, list[list[int]]], device: str, settings: dict, *, preempted: bool) -> None:
    path, expected = checkpoint
    config = EngineConfig(device=device, dtype=torch.float32, forbid_sync=device == "cuda", **settings)
    engine = await AsyncEngine.start(load(path), config)
    rng = random.Random(5)

    async def arrive(index: int, prompt: list[int]) -> list[int]:
        await asyncio.sleep(rng.random() * 0.05)
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        outputs = engine.generate(Request(f"r{index}", prompt, sampling))
        return [token async for output in outputs for token in output.new_token_ids]

    try:
        found = await asyncio.gather(*(arrive(index, prompt) for index, prompt in enumerate(prompts())))
        assert (engine.stats.num_preemptions > 0) == preempted
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
    finally:
        await engine.stop()
    assert found == expected
