"""Greedy tokens in float32 equal those of transformers, for every family and every setting of the engine.

Each family has one config per branch of its architecture. transformers has no FP8 cache: over one, the tests check
that settings do not change answers.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from tiny_checkpoints import write_checkpoint

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_models import deepseek_v3, llama, load, qwen3_next

VOCAB = 131
NUM_PROMPTS, OUTPUT_LEN = 16, 16

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
DELTA_NET = {
    **MIXTURE,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
}
MINIMAX = {
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 32,
}
# The config also has rotary_dim, which transformers 5.17 ignores.
HALF_ROTARY = {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}


class TinyModel(NamedTuple):
    """A config of transformers.

    family: prefix of transformers' class names.
    fields: in addition to COMMON.
    has_mtp: the checkpoint has layers for multi-token prediction.
    """

    family: str
    fields: dict[str, object]
    has_mtp: bool = False


TINY_MODELS = {
    "Llama, tied": TinyModel("Llama", {"tie_word_embeddings": True}),
    "Llama, MHA": TinyModel("Llama", {"num_key_value_heads": 4}),
    "Llama, MQA, llama3 scaling": TinyModel("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3_SCALING}),
    "Llama, biases": TinyModel("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, head size of its own": TinyModel("Llama", {"head_dim": 32}),
    "Qwen2": TinyModel("Qwen2", {}),
    "Qwen3": TinyModel("Qwen3", {"head_dim": 32}),
    "Qwen3-MoE": TinyModel("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True}),
    "Qwen3-MoE, some dense, weights as chosen": TinyModel(
        "Qwen3Moe", {**MIXTURE, "norm_topk_prob": False, "decoder_sparse_step": 2, "tie_word_embeddings": True}
    ),
    "Qwen3-Next": TinyModel("Qwen3Next", DELTA_NET, has_mtp=True),
    "Qwen3-Next, some dense, shared experts wider": TinyModel(
        "Qwen3Next",
        {**DELTA_NET, "mlp_only_layers": [1], "full_attention_interval": 2, "shared_expert_intermediate_size": 48},
    ),
    "MiniMax-M2": TinyModel("MiniMaxM2", {**MINIMAX, "rotary_dim": 16, "rope_parameters": HALF_ROTARY}),
    "MiniMax-M2, all rotary": TinyModel("MiniMaxM2", {**MINIMAX, "num_key_value_heads": 1}),
    "DeepSeek-V3": TinyModel(
        "DeepseekV3", {**LATENT_ATTENTION, "rope_parameters": YARN, "num_nextn_predict_layers": 1}, has_mtp=True
    ),
    "DeepSeek-V3, queries at once, all sparse, two shared": TinyModel(
        "DeepseekV3",
        {
            **LATENT_ATTENTION,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    ),
    "DeepSeek-V3, all dense": TinyModel(
        "DeepseekV3", {**LATENT_ATTENTION, "first_k_dense_replace": 3, "attention_bias": True}
    ),
}
# As many rows as prompts, so that no unused graphs are captured.
AMPLE_CACHE = {"num_blocks": 400, "max_num_seqs": NUM_PROMPTS}
# Blocks for two or three of the sixteen prompts: the others are preempted repeatedly.
SCARCE_CACHE = {"num_blocks": 14, "max_model_len": 200, "max_num_seqs": NUM_PROMPTS}
SETTINGS = {
    "one at a time": {**AMPLE_CACHE, "max_num_seqs": 1},
    "all at once": AMPLE_CACHE,
    "all at once, depth 1, no prefix cache": {"depth": 1, "prefix_caching": False, **AMPLE_CACHE},
    "chunked": {"max_num_batched_tokens": 40, **AMPLE_CACHE},
    "chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, **AMPLE_CACHE},
    "chunked, no prefix cache, pages of 32": {
        "max_num_batched_tokens": 48,
        "prefix_caching": False,
        "block_size": 32,
        **AMPLE_CACHE,
    },
    "preempted": SCARCE_CACHE,
    "preempted, chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, **SCARCE_CACHE},
    "preempted, no prefix cache": {"prefix_caching": False, **SCARCE_CACHE},
}

GPU_SETTINGS = {
    "neither compiled nor captured": {"compile": False, "graph_mode": "none", **AMPLE_CACHE},
    "only decodes from graphs": {"graph_mode": "full_decode_only", "max_num_batched_tokens": 40, **AMPLE_CACHE},
    "graphs, depth 1": {"depth": 1, **AMPLE_CACHE},
    "not compiled": {"compile": False, **AMPLE_CACHE},
    "compiled, launched kernel by kernel": {"compile": True, "graph_mode": "none", **AMPLE_CACHE},
    "mixed steps in pieces": {"graph_mode": "piecewise", **AMPLE_CACHE},
    "mixed steps in pieces, chunked": {"graph_mode": "piecewise", "max_num_batched_tokens": 80, **AMPLE_CACHE},
}
# One config per family. Qwen3-Next needs attention in two layers: with one, an FP8 cache changes too little to notice.
FP8_CACHE_MODELS = (
    *("Llama, tied", "Qwen2", "Qwen3", "Qwen3-MoE", "Qwen3-Next, some dense, shared experts wider", "MiniMax-M2"),
    "DeepSeek-V3",
)


def make_prompts() -> list[list[int]]:
    """Some prompts share a prefix, and a few prefixes are long enough for a checkpoint of a recurrent state."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(96)]
    return [
        shared[: rng.choice([0, 20, 40, 40, 96])] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 50))]
        for _ in range(NUM_PROMPTS)
    ]


def make_model(tiny: TinyModel) -> transformers.PreTrainedModel:
    make_config = getattr(transformers, f"{tiny.family}Config")
    with pytest.MonkeyPatch.context() as patch:
        # If fla is installed, transformers uses it also on a CPU, for which fla has no kernels.
        patch.setitem(sys.modules, "fla", None)
        model_class = getattr(transformers, f"{tiny.family}ForCausalLM")
    model = model_class(make_config(**COMMON | tiny.fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module", params=TINY_MODELS)
def checkpoint(request, tmp_path_factory, reference_generate) -> tuple[Path, list[list[int]]]:
    """The directory of a tiny random model, and transformers' answer to every prompt."""
    torch.manual_seed(list(TINY_MODELS).index(request.param))
    tiny = TINY_MODELS[request.param]
    model = make_model(tiny)
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, model, mtp=tiny.has_mtp)
    outputs = [reference_generate(model, prompt, OUTPUT_LEN) for prompt in make_prompts()]
    # A model that gives every prompt the same answer would prove nothing.
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
    assert len({token for output in outputs for token in output}) > 20
    return path, outputs


@pytest.mark.parametrize("settings", SETTINGS)
async def test_tokens_equal_transformers(checkpoint, settings, device):
    path, expected = checkpoint
    assert await generate(path, device, SETTINGS[settings], is_preempted=settings.startswith("preempted")) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("settings", GPU_SETTINGS)
async def test_graphs_and_compilation_change_no_token(checkpoint, settings, monkeypatch):
    for module in (llama, qwen3_next, deepseek_v3):
        # The steps of these tests have too few rows for the normal limit.
        monkeypatch.setattr(module, "MIN_COMPILED_ROWS", 9)
    path, expected = checkpoint
    assert await generate(path, "cuda", GPU_SETTINGS[settings]) == expected


@pytest.mark.parametrize("name", FP8_CACHE_MODELS)
async def test_no_setting_changes_tokens_over_an_fp8_cache(name, tmp_path, device):
    torch.manual_seed(list(TINY_MODELS).index(name))
    write_checkpoint(tmp_path, make_model(TINY_MODELS[name]), mtp=TINY_MODELS[name].has_mtp)
    without_fp8 = await generate(tmp_path, device, AMPLE_CACHE)
    whole = await generate(tmp_path, device, {"kv_cache_dtype": "fp8", **AMPLE_CACHE})
    chunked_settings = {
        "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 40,
        "depth": 1,
        "prefix_caching": False,
        **AMPLE_CACHE,
    }
    assert await generate(tmp_path, device, chunked_settings) == whole
    assert whole != without_fp8
    assert sum(fp8[0] == plain[0] for fp8, plain in zip(whole, without_fp8, strict=True)) > NUM_PROMPTS // 2


async def test_prompt_with_a_cached_prefix_computes_few_tokens(tmp_path, device):
    """Three prompts of 2,100 tokens share their first 2,000 tokens; the second and third compute fewer than 200."""
    torch.manual_seed(0)
    tiny = TINY_MODELS["Qwen3-Next"]
    write_checkpoint(tmp_path, make_model(tiny._replace(fields=tiny.fields | {"max_position_embeddings": 4096})))
    rng = random.Random(1)
    prompt = [rng.randrange(3, VOCAB) for _ in range(2100)]
    other_prompts = [prompt[:2000] + [rng.randrange(3, VOCAB) for _ in range(100)] for _ in range(2)]
    settings = {"device": device, "dtype": "float32", "num_blocks": 600, "max_num_seqs": 4}
    expected = await generate_in_turn(
        tmp_path, EngineConfig(prefix_caching=False, **settings), [prompt, *other_prompts]
    )
    found = await generate_in_turn(tmp_path, EngineConfig(**settings), [prompt, *other_prompts])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [computed for _, computed in expected] == [2100 + OUTPUT_LEN - 1] * 3
    assert all(computed - (OUTPUT_LEN - 1) < 200 for _, computed in found[1:])


async def generate_in_turn(path: Path, config: EngineConfig, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Sends prompts one after another. Returns each answer with the number of tokens that were computed for it."""
    engine = await AsyncEngine.start(load(path), config)
    found = []
    try:
        for prompt in prompts:
            computed_before = engine.stats.iteration_tokens
            outputs = engine.generate(
                Request("r", prompt, SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True))
            )
            tokens = [token async for output in outputs for token in output.new_token_ids]
            found.append((tokens, engine.stats.iteration_tokens - computed_before))
    finally:
        await engine.stop()
    return found


async def generate(path: Path, device: str, settings: dict, *, is_preempted: bool = False) -> list[list[int]]:
    config = EngineConfig(device=device, dtype="float32", forbid_sync=device == "cuda", **{"depth": 2, **settings})
    engine = await AsyncEngine.start(load(path), config)
    rng = random.Random(5)

    async def generate_after_delay(index: int, prompt: list[int]) -> list[int]:
        # The arrival times are short, or a GPU would finish each request before the next one arrives.
        await asyncio.sleep(0 if is_preempted else rng.random() * 0.05)
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        outputs = engine.generate(Request(f"r{index}", prompt, sampling))
        return [token async for output in outputs for token in output.new_token_ids]

    try:
        found = await asyncio.gather(
            *(generate_after_delay(index, prompt) for index, prompt in enumerate(make_prompts()))
        )
        stats = engine.stats
        assert (stats.num_preemptions > 0) == is_preempted
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_state_slots == engine.info.num_state_slots
        return found
    finally:
        await engine.stop()
