"""In bf16, log-probabilities of each attention backend are at least as near to float32 as those of transformers."""

import asyncio

import pytest
import torch

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_kernels.platform import has_cute, has_flash_attention
from nanovllm_models import load, load_tokenizer

pytestmark = pytest.mark.gpu

TOPICS = ["the sea", "a dragon", "bread", "the planets", "chess", "a lighthouse", "winter", "a clock"]
OUTPUT_LEN = 24
SETTINGS = {
    "triton": {"attention_backend": "triton"},
    "triton, launched": {"attention_backend": "triton", "graph_mode": "none"},
    "flash": {"attention_backend": "flash", "graph_mode": "full_decode_only"},
    "cutedsl": {"attention_backend": "cutedsl"},
    "cutedsl, launched, depth 1": {"attention_backend": "cutedsl", "graph_mode": "none", "depth": 1},
    "fastest": {"attention_backend": "fastest"},
    "fastest, chunked": {"attention_backend": "fastest", "max_num_batched_tokens": 48},
}
INSTALLATION_CHECKS = {"flash": has_flash_attention, "cutedsl": has_cute}


@pytest.fixture(scope="module")
def reference(default_model, load_reference):
    return load_reference(default_model, torch.float32, "cuda")


@pytest.fixture(scope="module")
def rounded_reference(default_model, load_reference):
    return load_reference(default_model, torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", SETTINGS)
async def test_distributions_are_as_near_to_float32_as_those_of_transformers(
    name, default_model, reference, rounded_reference
):
    settings = SETTINGS[name]
    is_installed = INSTALLATION_CHECKS.get(settings["attention_backend"])
    if is_installed is not None and not is_installed():
        pytest.skip(f"the backend {settings['attention_backend']} isn't installed here")
    tokenizer = load_tokenizer(default_model)
    chats = ([{"role": "user", "content": f"Write a short story about {topic}."}] for topic in TOPICS)
    prompts = [tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False).tolist() for chat in chats]
    config = EngineConfig(device="cuda", dtype="bfloat16", max_num_seqs=8, forbid_sync=True, **settings)
    engine = await AsyncEngine.start(load(default_model), config)
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, logprobs=5, ignore_eos=True)

    async def generate(index: int, prompt: list[int]):
        outputs = [output async for output in engine.generate(Request(f"r{index}", prompt, sampling))]
        tokens = [token for output in outputs for token in output.new_token_ids]
        return tokens, [entry.top for output in outputs for entry in output.logprobs]

    try:
        answers = await asyncio.gather(*(generate(index, prompt) for index, prompt in enumerate(prompts)))
    finally:
        await engine.stop()
    own_errors, rounded_errors = [], []
    for prompt, (tokens, tops) in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
        top = torch.tensor([[token for token, _ in top] for top in tops], device="cuda")
        with torch.inference_mode():
            expected, rounded = (
                model(ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1).gather(1, top)
                for model in (reference, rounded_reference)
            )
        logprobs = torch.tensor([[logprob for _, logprob in top] for top in tops], device="cuda")
        error = (logprobs - expected).abs()
        # bf16 rounds a logit of 20 by up to 0.06, and thirty layers add their errors.
        assert error.max() < 0.5
        assert error.mean() < 0.05
        own_errors.append(error)
        rounded_errors.append((rounded - expected).abs())
    assert torch.cat(own_errors).mean() <= torch.cat(rounded_errors).mean()
