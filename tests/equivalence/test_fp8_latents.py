"""DeepSeek-V3 over an FP8 cache gives the greedy tokens of transformers with quantised latents."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_kernels import fp8
from nanovllm_models import load

VOCAB, NUM_PROMPTS, OUTPUT_LEN = 131, 16, 24
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
AMPLE_CACHE = {"num_blocks": 400, "max_num_seqs": NUM_PROMPTS}
SCARCE_CACHE = {"num_blocks": 14, "max_model_len": 200, "max_num_seqs": NUM_PROMPTS}
SETTINGS = {
    "all at once": AMPLE_CACHE,
    "chunked, no prefix cache, depth 1": {
        "max_num_batched_tokens": 40,
        "prefix_caching": False,
        "depth": 1,
        **AMPLE_CACHE,
    },
    "preempted, chunked": {"max_num_batched_tokens": 40, **SCARCE_CACHE},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(64)]
    return [
        shared[: rng.choice([0, 20, 40])] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 50))]
        for _ in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, reference_generate) -> tuple[Path, list[list[int]]]:
    torch.manual_seed(1)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_nextn_predict_layers=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        max_position_embeddings=256,
        rope_parameters=YARN | {"original_max_position_embeddings": 64},
        initializer_range=0.4,
        eos_token_id=2,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    path = tmp_path_factory.mktemp("deepseek_v3")
    model.save_pretrained(path)
    outputs = [reference_generate(model, prompt, OUTPUT_LEN).tokens for prompt in make_prompts()]
    # A model that gives every prompt the same answer would prove nothing.
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
    assert len({token for output in outputs for token in output}) > 20
    return path, outputs


async def generate(path: Path, device: str, settings: dict, *, is_preempted: bool = False) -> list[list[int]]:
    config = EngineConfig(device=device, dtype="float32", forbid_sync=device == "cuda", **{"depth": 2, **settings})
    engine = await AsyncEngine.start(load(path), config)
    rng = random.Random(5)

    async def generate_after_delay(index: int, prompt: list[int]) -> list[int]:
        # With longer delays, a GPU would finish each request before the next request arrives.
        await asyncio.sleep(0 if is_preempted else rng.random() * 0.05)
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        outputs = engine.generate(Request(f"r{index}", prompt, sampling))
        return [token async for output in outputs for token in output.new_token_ids]

    try:
        found = await asyncio.gather(
            *(generate_after_delay(index, prompt) for index, prompt in enumerate(make_prompts()))
        )
        assert (engine.stats.num_preemptions > 0) == is_preempted
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
        return found
    finally:
        await engine.stop()


@pytest.fixture
def quantised_answers(checkpoint, reference_generate, monkeypatch) -> list[list[int]]:
    expand = modeling_deepseek_v3.DeepseekV3Attention.expand_kv

    def expand_quantised(self, latent, k_rope):
        rows = torch.cat((latent, k_rope), -1)
        rows = fp8.dequantize(*fp8.quantize(rows), rows.dtype)
        return expand(self, *rows.split((latent.shape[-1], k_rope.shape[-1]), -1))

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv", expand_quantised)
    model = DeepseekV3ForCausalLM.from_pretrained(checkpoint[0], dtype=torch.float32).eval()
    return [reference_generate(model, prompt, OUTPUT_LEN).tokens for prompt in make_prompts()]


@pytest.mark.parametrize("setting", SETTINGS)
async def test_tokens_over_an_fp8_cache_equal_those_of_quantised_latents(
    checkpoint, quantised_answers, setting, device
):
    path, plain_answers = checkpoint
    assert quantised_answers != plain_answers
    fp8_settings = {"kv_cache_dtype": "fp8", **SETTINGS[setting]}
    found = await generate(path, device, fp8_settings, is_preempted=setting.startswith("preempted"))
    # A tie between two e4m3 values may be rounded either way, which may change a token.
    assert sum(tokens == expected for tokens, expected in zip(found, quantised_answers, strict=True)) >= NUM_PROMPTS - 1
