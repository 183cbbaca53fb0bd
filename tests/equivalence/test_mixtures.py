"""Mixtures of experts through the whole engine: transformers' greedy tokens, in float32, whatever runs beside them."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_models import load

VOCAB, NUM_PROMPTS, OUTPUT = 131, 16, 24
FAMILIES = {
    "Qwen3-MoE": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 96, "mlp_only_layers": [0]},
    ),
    "MiniMax-M2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {"num_local_experts": 8, "intermediate_size": 32, "rotary_dim": 16, "bos_token_id": 1},
    ),
}
SETTINGS = {
    "all at once": {"num_blocks": 400},
    "preempted, chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, "num_blocks": 14, "max_model_len": 200},
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
    torch.manual_seed(1)
    make_config, make_model, fields = FAMILIES[request.param]
    common = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    common |= {"vocab_size": VOCAB, "max_position_embeddings": 256, "head_dim": 32, "num_experts_per_tok": 3}
    model = make_model(make_config(**common, **fields, initializer_range=0.4, eos_token_id=2)).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                weight.normal_(0, 0.3)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.normal_(1, 0.3)
    path = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(path)
    outputs = [reference_generate(model, prompt, OUTPUT) for prompt in prompts()]
    # A model that says the same thing whatever it is asked would prove nothing.
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
    assert len({token for output in outputs for token in output}) > 20
    return path, outputs


@pytest.mark.parametrize("settings", SETTINGS)
async def test_tokens_equal_transformers(checkpoint, settings, device):
    path, expected = checkpoint
    config = EngineConfig(
        device=device, dtype=torch.float32, forbid_sync=device == "cuda", max_num_seqs=NUM_PROMPTS, **SETTINGS[settings]
    )
    engine = await AsyncEngine.start(load(path), config)

    async def answer(index: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        outputs = engine.generate(Request(f"r{index}", prompt, sampling))
        return [token async for output in outputs for token in output.new_token_ids]

    try:
        found = await asyncio.gather(*(answer(index, prompt) for index, prompt in enumerate(prompts())))
        assert (engine.stats.num_preemptions > 0) == settings.startswith("preempted")
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
    finally:
        await engine.stop()
    assert found == expected
