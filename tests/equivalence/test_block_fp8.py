"""The engine runs a block FP8 checkpoint and gives the greedy tokens of transformers with the same values.

Some answers may differ, because the order of a sum can decide how an input is rounded to e4m3. On a GPU, answers differ
after a few tokens, because FP8 accumulators have 14 bits.
"""

import asyncio
import random

import pytest
import torch
from tiny_checkpoints import write_checkpoint, write_twin
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_kernels.gemm.block_fp8 import GROUP, quantize_groups
from nanovllm_models import load

VOCAB, NUM_PROMPTS, OUTPUT_LEN = 131, 16, 16
SETTINGS = {
    "all at once": {},
    "chunked, depth 1, no prefix cache": {"max_num_batched_tokens": 40, "depth": 1, "prefix_caching": False},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(NUM_PROMPTS)]


def round_input(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    values, scales = quantize_groups(inputs[0].flatten(0, -2))
    rounded = values.float() * scales.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return (rounded.view(inputs[0].shape),)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, reference_generate):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("fp8")
    write_checkpoint(path / "fp8", Qwen3ForCausalLM(config), fp8=True)
    write_twin(path / "fp8", path / "twin")
    twin = AutoModelForCausalLM.from_pretrained(path / "twin").eval()
    for name, module in twin.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(round_input)
    return path / "fp8", [reference_generate(twin, prompt, OUTPUT_LEN).tokens for prompt in make_prompts()]


@pytest.mark.parametrize("setting", SETTINGS)
async def test_tokens_equal_those_of_rounded_inputs(checkpoint, setting, device):
    path, expected = checkpoint
    config = EngineConfig(
        device=device,
        dtype="float32",
        num_blocks=200,
        max_num_seqs=NUM_PROMPTS,
        **{"depth": 2, **SETTINGS[setting]},
    )
    engine = await AsyncEngine.start(load(path), config)

    async def generate(index: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        outputs = engine.generate(Request(f"r{index}", prompt, sampling))
        return [token async for output in outputs for token in output.new_token_ids]

    try:
        answers = await asyncio.gather(*(generate(index, prompt) for index, prompt in enumerate(make_prompts())))
    finally:
        await engine.stop()
    length = OUTPUT_LEN if device == "cpu" else 2
    num_equal = sum(
        tokens[:length] == expected_tokens[:length] for tokens, expected_tokens in zip(answers, expected, strict=True)
    )
    assert num_equal >= NUM_PROMPTS * 3 // 4
