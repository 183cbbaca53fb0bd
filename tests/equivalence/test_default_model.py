"""The default model gives the same answers as transformers with the same weights."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from nanovllm_core import AsyncEngine, EngineConfig, Request, RequestOutput, SamplingParams
from nanovllm_core.execution.prompt_scores import SCORE_CHUNK_TOKENS
from nanovllm_kernels.platform import has_numba
from nanovllm_models import load, load_tokenizer

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "What is 17 + 25?",
    "List three uses of a paperclip.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What are the planets of the solar system?",
    "Tell me a short story about a dragon.",
    "How do I tie a tie?",
    "What is the difference between a virus and a bacterium?",
    "Suggest a name for a cat.",
    "Summarise the plot of Romeo and Juliet.",
    "What does HTTP stand for?",
    "How many continents are there?",
    "Describe the taste of an apple.",
    "What is the meaning of life?",
]
OUTPUT_LEN = 40
# Errors of log-probabilities in the served dtype: bf16 on a CPU, float16 on a GPU.
MAX_MEAN_ERROR = {"cpu": 0.09, "cuda": 0.02}
MAX_ERROR = {"cpu": 0.25, "cuda": 0.05}

SETTINGS = {
    "as served": {},
    "one at a time, depth 1, no prefix cache": {"max_num_seqs": 1, "depth": 1, "prefix_caching": False},
    "chunked, depth 2": {"max_num_batched_tokens": 48, "max_num_seqs": 16, "depth": 2},
    "preempted, depth 2": {"num_blocks": 28, "max_model_len": 400, "depth": 2},
}


@pytest.fixture(scope="module")
def prompts(default_model) -> list[list[int]]:
    tokenizer = load_tokenizer(default_model)
    conversations = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False).tolist() for chat in conversations]


@pytest.mark.skipif(not has_numba(), reason="there are no kernels in Numba")
async def test_seed_gives_the_same_tokens_in_any_batch_without_bf16_instructions(default_model, prompts, monkeypatch):
    monkeypatch.setattr("nanovllm_kernels.platform.prefers_packed_bf16", lambda: False)
    monkeypatch.setattr("nanovllm_kernels.gemm.prefers_packed_bf16", lambda: False)
    random_sampling = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, logprobs=1)

    async def run(engine: AsyncEngine, index: int) -> list[tuple[int, float]]:
        sampling = replace(random_sampling, seed=index)
        request = Request(f"r{index}", token_ids=prompts[index], sampling=sampling)
        outputs = [output async for output in engine.generate(request)]
        tokens = [token for output in outputs for token in output.new_token_ids]
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()]
        assert len(tokens) == len(logprobs) == 16
        return list(zip(tokens, logprobs, strict=True))

    engine = await AsyncEngine.start(load(default_model), EngineConfig(device="cpu", prefix_caching=False))
    alone = [await run(engine, index) for index in (7, 8)]
    together = await asyncio.gather(*(run(engine, index) for index in range(10)))
    await engine.stop()
    chunked = EngineConfig(device="cpu", max_num_batched_tokens=32, max_num_seqs=10, prefix_caching=False)
    engine = await AsyncEngine.start(load(default_model), chunked)
    in_chunks = await asyncio.gather(*(run(engine, index) for index in range(10)))
    await engine.stop()
    assert alone == [together[7], together[8]]
    assert in_chunks == together


@pytest.fixture(scope="module")
def reference(default_model, load_reference, device) -> PreTrainedModel:
    return load_reference(default_model, torch.float32, device)


@pytest.mark.parametrize("setting", SETTINGS)
async def test_answers_to_chats_equal_transformers(setting, default_model, prompts, reference, greedy_choices, device):
    num_chats = {"cpu": (2, 8), "cuda": (5, 12)}[device]
    prompts = prompts[: num_chats[0] if setting.startswith("one at a time") else num_chats[1]]
    config = EngineConfig(device=device, dtype="float32", **SETTINGS[setting])
    engine = await AsyncEngine.start(load(default_model), config)
    rng = random.Random(0)
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)

    async def generate_after_delay(index: int, prompt: list[int]) -> list[int]:
        await asyncio.sleep(rng.random() * 0.3)
        outputs = engine.generate(Request(f"r{index}", prompt, sampling))
        return [token async for output in outputs for token in output.new_token_ids]

    try:
        found = await asyncio.gather(*(generate_after_delay(index, prompt) for index, prompt in enumerate(prompts)))
        assert (engine.stats.num_preemptions > 0) == setting.startswith("preempted")
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
    finally:
        await engine.stop()
    for prompt, output in zip(prompts, found, strict=True):
        assert len(output) == OUTPUT_LEN
        assert output == greedy_choices(reference, prompt, output)


@pytest.fixture(scope="module")
def expected_logprobs(prompts, reference, device) -> list[torch.Tensor]:
    with torch.inference_mode():
        logits = [reference(torch.tensor([prompt], device=device)).logits[0, -1] for prompt in prompts]
    return [row.float().log_softmax(-1).cpu() for row in logits]


async def test_served_dtype_is_close_to_float32(default_model, prompts, expected_logprobs, device):
    engine = await AsyncEngine.start(load(default_model), EngineConfig(device=device))
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=10)

    async def measure_errors(index: int, cache_salt: str) -> list[float]:
        request = Request(f"r{index}", prompts[index], sampling, cache_salt)
        (output,) = [output async for output in engine.generate(request)]
        return [abs(logprob - float(expected_logprobs[index][token])) for token, logprob in output.logprobs[0].top]

    try:
        at_once = await asyncio.gather(*(measure_errors(index, "at once") for index in range(len(prompts))))
        in_turn = [await measure_errors(index, "in turn") for index in range(len(prompts))]
    finally:
        await engine.stop()
    for found in (at_once, in_turn):
        largest_errors = [max(question_errors) for question_errors in found]
        assert sum(largest_errors) / len(largest_errors) < MAX_MEAN_ERROR[device]
        assert max(largest_errors) < MAX_ERROR[device]


async def test_served_dtype_knows_the_capital_of_france(default_model, prompts, device):
    """Tries several batches, because errors of bf16 may exceed the likeliest token's lead of 0.1."""
    tokenizer = load_tokenizer(default_model)
    engine = await AsyncEngine.start(load(default_model), EngineConfig(device=device))
    sampling = SamplingParams(temperature=0, max_tokens=16)

    async def answer(name: str, prompt: list[int], cache_salt: str) -> str:
        outputs = engine.generate(Request(name, prompt, sampling, cache_salt))
        return tokenizer.decode([token async for output in outputs for token in output.new_token_ids])

    try:
        for num_others in (0, 3, 7):
            for other_prompts in ([prompts[0]] * num_others, prompts[1 : num_others + 1]):
                batch = [prompts[0], *other_prompts]
                answers = await asyncio.gather(
                    *(answer(f"r{index}", prompt, f"{num_others} others") for index, prompt in enumerate(batch))
                )
                answers_about_france = [
                    text for text, prompt in zip(answers, batch, strict=True) if prompt == prompts[0]
                ]
                assert all("Paris" in text for text in answers_about_france), (num_others, answers_about_france)
    finally:
        await engine.stop()


@pytest.mark.parametrize("setting", ["as served", "chunked, depth 2"])
async def test_prompt_logprobs_equal_transformers(setting, default_model, prompts, reference, device):
    config = EngineConfig(device=device, dtype="float32", forbid_sync=device == "cuda", **SETTINGS[setting])
    engine = await AsyncEngine.start(load(default_model), config)

    async def first_output(name: str, prompt: list[int], num_top: int | None) -> RequestOutput:
        sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=num_top)
        first, *_ = [output async for output in engine.generate(Request(name, prompt, sampling))]
        return first

    scored_prompts = [
        *prompts[:3],
        [token for prompt in prompts[:8] for token in prompt][: 2 * SCORE_CHUNK_TOKENS + 20],
    ]
    try:
        scored_outputs, plain_outputs = await asyncio.gather(
            asyncio.gather(*(first_output(f"a{index}", prompt, index) for index, prompt in enumerate(scored_prompts))),
            asyncio.gather(*(first_output(f"b{index}", prompt, None) for index, prompt in enumerate(scored_prompts))),
        )
    finally:
        await engine.stop()
    assert len(scored_prompts[-1]) > 2 * SCORE_CHUNK_TOKENS
    for index, (prompt, scored, plain) in enumerate(zip(scored_prompts, scored_outputs, plain_outputs, strict=True)):
        assert plain.prompt_logprobs is None
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            expected = reference(ids).logits[0, :-1].float().log_softmax(-1).cpu()
        own_logprobs = expected.gather(1, ids[0, 1:, None].cpu()).squeeze(1)
        entries = [*scored.prompt_logprobs]
        torch.testing.assert_close(torch.tensor([entry.logprob for entry in entries]), own_logprobs, atol=1e-3, rtol=0)
        likeliest = torch.tensor([[value for _, value in entry.top] for entry in entries])
        torch.testing.assert_close(likeliest, expected.topk(index).values, atol=1e-3, rtol=0)
        top_ids = torch.tensor([[token for token, _ in entry.top] for entry in entries], dtype=torch.int64)
        torch.testing.assert_close(likeliest, expected.gather(1, top_ids), atol=1e-3, rtol=0)
        ranks = torch.tensor([entry.rank for entry in entries])
        # Rounding may swap tokens that are almost equally likely.
        min_rank, max_rank = ((expected >= own_logprobs.unsqueeze(1) + margin).sum(1) for margin in (2e-3, -2e-3))
        assert (min_rank + 1 <= ranks).all()
        assert (ranks <= max_rank).all()
