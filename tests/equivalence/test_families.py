"""Greedy tokens in float32 equal those of transformers, for every model family."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from samples import sample_pairs
from tiny_checkpoints import write_checkpoint
from tiny_models import (
    AMPLE_CACHE,
    NUM_PROMPTS,
    OUTPUT_LEN,
    SCARCE_CACHE,
    TIERED_CACHE,
    TINY_MODELS,
    VOCAB,
    generate,
    make_model,
    make_prompts,
)

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_models import deepseek_v3, llama, load, qwen3_next

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
TIERED_SETTINGS = {
    "all at once": TIERED_CACHE,
    "chunked, depth 1": {"max_num_batched_tokens": 40, "depth": 1, **TIERED_CACHE},
}

GPU_SETTINGS = {
    "neither compiled nor captured": {"compile": False, "graph_mode": "none", **AMPLE_CACHE},
    "only decodes from graphs": {"graph_mode": "full_decode_only", "max_num_batched_tokens": 40, **AMPLE_CACHE},
    "graphs, depth 1": {"depth": 1, **AMPLE_CACHE},
    "not compiled": {"compile": False, **AMPLE_CACHE},
    "compiled, launched kernel by kernel": {"compile": True, "graph_mode": "none", **AMPLE_CACHE},
    "steps with prompts in pieces": {"graph_mode": "piecewise", **AMPLE_CACHE},
    "steps with prompts in pieces, chunked": {"graph_mode": "piecewise", "max_num_batched_tokens": 80, **AMPLE_CACHE},
}
FP8_CACHE_MODELS = (
    *("Llama, tied", "Qwen2", "Qwen3", "Qwen3-MoE", "Qwen3-Next, some dense, shared experts wider", "MiniMax-M2"),
    "DeepSeek-V3",
)


class Checkpoint(NamedTuple):
    """A tiny random model, with transformers' answers and log-probabilities."""

    path: Path
    outputs: list[list[int]]
    logprobs: list[list[float]]


@pytest.fixture(scope="module")
def write_model_and_answers(tmp_path_factory, reference_generate) -> Callable[[str], Checkpoint]:
    @cache
    def make(name: str) -> Checkpoint:
        torch.manual_seed(list(TINY_MODELS).index(name))
        tiny = TINY_MODELS[name]
        model = make_model(tiny)
        path = tmp_path_factory.mktemp("tiny")
        write_checkpoint(path, model, mtp=tiny.has_mtp)
        answers = [reference_generate(model, prompt, OUTPUT_LEN) for prompt in make_prompts()]
        outputs, logprobs = map(list, zip(*answers, strict=True))
        # A model that gives every prompt the same answer would prove nothing.
        assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
        assert len({token for output in outputs for token in output}) > 20
        return Checkpoint(path, outputs, logprobs)

    return make


@pytest.mark.parametrize(("name", "setting"), sample_pairs(TINY_MODELS, SETTINGS, 3))
async def test_tokens_equal_transformers(name, setting, write_model_and_answers, device):
    path, expected, _ = write_model_and_answers(name)
    assert await generate(path, device, SETTINGS[setting], is_preempted=setting.startswith("preempted")) == expected


@pytest.mark.parametrize(("name", "setting"), sample_pairs(TINY_MODELS, TIERED_SETTINGS, 1))
async def test_tokens_and_log_probabilities_over_loaded_blocks_equal_transformers(
    name, setting, write_model_and_answers, device
):
    path, expected, expected_logprobs = write_model_and_answers(name)
    logprobs: list[list[float]] = []
    samplings = ({"temperature": 0, "logprobs": 0},)
    settings = TIERED_SETTINGS[setting]
    assert await generate(path, device, settings, is_preempted=True, samplings=samplings, logprobs=logprobs) == expected
    # Each prompt was answered twice. Log-probabilities of Qwen3-Next differ by 1e-3, also without tiers.
    torch.testing.assert_close(logprobs, 2 * expected_logprobs, atol=2e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", GPU_SETTINGS)
@pytest.mark.parametrize("name", TINY_MODELS)
async def test_graphs_and_compilation_change_no_token(name, setting, write_model_and_answers, monkeypatch):
    for module in (llama, qwen3_next, deepseek_v3):
        # The steps of these tests have too few rows for the normal limit.
        monkeypatch.setattr(module, "MIN_COMPILED_ROWS", 9)
    path, expected, _ = write_model_and_answers(name)
    assert await generate(path, "cuda", GPU_SETTINGS[setting]) == expected


@pytest.mark.parametrize("name", FP8_CACHE_MODELS)
async def test_no_setting_changes_tokens_over_an_fp8_cache(name, tmp_path, device):
    torch.manual_seed(list(TINY_MODELS).index(name))
    write_checkpoint(tmp_path, make_model(TINY_MODELS[name]), mtp=TINY_MODELS[name].has_mtp)
    without_fp8 = await generate(tmp_path, device, AMPLE_CACHE)
    unchunked = await generate(tmp_path, device, {"kv_cache_dtype": "fp8", **AMPLE_CACHE})
    chunked_settings = {
        "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 40,
        "depth": 1,
        "prefix_caching": False,
        **AMPLE_CACHE,
    }
    assert await generate(tmp_path, device, chunked_settings) == unchunked
    assert unchunked != without_fp8
    assert sum(fp8[0] == plain[0] for fp8, plain in zip(unchunked, without_fp8, strict=True)) > NUM_PROMPTS // 2


async def test_prompt_with_a_cached_prefix_computes_few_tokens(tmp_path, device):
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
    """Returns each answer with the number of tokens that the engine computed."""
    engine = await AsyncEngine.start(load(path), config)
    found = []
    try:
        for prompt in prompts:
            computed_before = engine.stats.num_computed_tokens
            outputs = engine.generate(
                Request("r", prompt, SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True))
            )
            tokens = [token async for output in outputs for token in output.new_token_ids]
            found.append((tokens, engine.stats.num_computed_tokens - computed_before))
    finally:
        await engine.stop()
    return found
