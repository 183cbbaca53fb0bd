"""Tiny random models of every family, and prompts and settings for engines that run them."""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from nanovllm_core import AsyncEngine, EngineConfig, EngineStats, Request, SamplingParams
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.transfer.fetch_times import FetchTimes
from nanovllm_models import ModelDirectory, load

VOCAB = 131
NUM_PROMPTS, OUTPUT_LEN = 16, 16
MAX_COPY_S = 30.0

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
    """`family` is the prefix of transformers' class names. `fields` are fields of the config in addition to COMMON."""

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
    "Qwen3-MoE, some dense, weights not normalised": TinyModel(
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
    "DeepSeek-V3, no low-rank queries, all sparse, two shared": TinyModel(
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
AMPLE_CACHE = {"num_blocks": 400, "max_num_seqs": NUM_PROMPTS}
SCARCE_CACHE = {"num_blocks": 14, "max_model_len": 200, "max_num_seqs": NUM_PROMPTS}
TIERED_CACHE = {**SCARCE_CACHE, "kv_offload_gib": 0.05}


def make_prompts() -> list[list[int]]:
    """A few shared prefixes are long enough for a checkpoint of a recurrent state."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(96)]
    return [
        shared[: rng.choice([0, 20, 40, 40, 96])] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 50))]
        for _ in range(NUM_PROMPTS)
    ]


def make_model(tiny: TinyModel) -> transformers.PreTrainedModel:
    make_config = getattr(transformers, f"{tiny.family}Config")
    with pytest.MonkeyPatch.context() as patch:
        # transformers uses fla also on a CPU, but fla has no kernels for a CPU.
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


def make_predictions(answers: list[list[int]]) -> list[list[int]]:
    return [
        [(token + 1) % VOCAB if position % 9 == 8 else token for position, token in enumerate(answer)]
        for answer in answers
    ]


async def generate(
    path: Path,
    device: str,
    settings: dict,
    *,
    is_preempted: bool = False,
    predictions: list[list[int]] | None = None,
    draft: Path | None = None,
    samplings: Sequence[dict] = ({"temperature": 0},),
    logprobs: list[list[float]] | None = None,
    prepare: Callable[[AsyncEngine], Awaitable[None]] | None = None,
    optional_tiers: Collection[str] = (),
    final_stats: list[EngineStats] | None = None,
) -> list[list[int]]:
    """Returns the answers to `make_prompts`.

    logprobs, final_stats: lists to which `generate` appends results.
    optional_tiers: tiers that need not load tokens. All other tiers must load some.
    """
    config = EngineConfig(device=device, dtype="float32", forbid_sync=device == "cuda", **{"depth": 2, **settings})
    draft_directory = None if draft is None else ModelDirectory(draft, draft.name)
    patch = pytest.MonkeyPatch()
    # Otherwise engines rarely load or fetch blocks, because computing a tiny model's blocks is often faster.
    patch.setattr(CopyTimeModel, "predict", lambda *_: 0.0)
    patch.setattr(FetchTimes, "is_worthwhile", lambda *_: True)
    engine = await AsyncEngine.start(load(path, draft=draft_directory), config)
    rng = random.Random(5)
    answers: list[list[list[int]]] = []

    async def generate_after_delay(index: int, prompt: list[int]) -> tuple[list[int], list[float]]:
        # With longer delays, a GPU would finish each request before the next request arrives.
        await asyncio.sleep(0 if is_preempted else rng.random() * 0.05)
        options = samplings[index % len(samplings)]
        sampling = SamplingParams(seed=index, max_tokens=OUTPUT_LEN, ignore_eos=True, **options)
        prediction = () if predictions is None else predictions[index]
        request = Request(f"r{index}", prompt, sampling, prediction=prediction)
        outputs = [output async for output in engine.generate(request)]
        tokens = [token for output in outputs for token in output.new_token_ids]
        return tokens, [entry.logprob for output in outputs for entry in output.logprobs or ()]

    try:
        if prepare is not None:
            await prepare(engine)
        for _ in range(2 if config.kv_offload_gib else 1):
            requests = (generate_after_delay(index, prompt) for index, prompt in enumerate(make_prompts()))
            tokens, token_logprobs = map(list, zip(*await asyncio.gather(*requests), strict=True))
            answers.append(tokens)
            if logprobs is not None:
                logprobs += token_logprobs
        assert all(found == answers[0] for found in answers)
        stats = engine.stats
        assert (stats.num_preemptions > 0) == is_preempted
        for tier, num_tokens in stats.loaded_tokens:
            assert num_tokens > 0 or tier in optional_tiers, (stats.loaded_tokens, stats.fetches)
        deadline_s = time.monotonic() + MAX_COPY_S
        while engine.stats.num_free_blocks < stats.num_blocks:
            assert config.kv_offload_gib
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.001)
        assert stats.num_free_state_slots == engine.info.num_state_slots
        if final_stats is not None:
            final_stats.append(stats)
        if predictions is not None:
            assert sum(stats.verified_drafts_by_position) > sum(stats.accepted_drafts_by_position) > NUM_PROMPTS // 2
        elif config.speculate is not None:
            assert sum(stats.verified_drafts_by_position) > NUM_PROMPTS
        return answers[0]
    finally:
        await engine.stop()
        patch.undo()
