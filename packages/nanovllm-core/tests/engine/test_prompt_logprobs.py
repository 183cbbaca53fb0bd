import asyncio
import random

import pytest
import torch
import toy_model

from nanovllm_core import AsyncEngine, EngineConfig, PromptLogprobs, Request, SamplingParams

BASE = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "depth": 2}
OUTPUT_LEN = 40
CONFIGS = {
    "plain": {},
    "depth 1, no prefix cache": {"depth": 1, "prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 24},
    "chunked, depth 1, no prefix cache": {"max_num_batched_tokens": 33, "depth": 1, "prefix_caching": False},
    "preempted": {"num_blocks": 17, "max_model_len": 200},
    "preempted, chunked": {"num_blocks": 17, "max_model_len": 200, "max_num_batched_tokens": 24},
    "pages of 32": {"block_size": 32, "max_num_batched_tokens": 48},
}


def make_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(90) for _ in range(60)]
    requests = []
    for index in range(16):
        length = rng.choice([1, 2, rng.randrange(1, 60)])
        prompt = shared[: rng.choice([0, 16, 33, 60])] + [rng.randrange(90) for _ in range(length)]
        num_top = rng.choice([None, 0, 1, 3, 20])
        penalty = rng.choice([0.0, 0.0, 2.0])
        sampling = SamplingParams(
            temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, prompt_logprobs=num_top, presence_penalty=penalty
        )
        requests.append(Request(f"r{index}", prompt, sampling))
    return requests


async def serve(engine: AsyncEngine, request: Request) -> tuple[list[int], PromptLogprobs | None, int]:
    outputs = [output async for output in engine.generate(request)]
    assert not any(output.prompt_logprobs for output in outputs[1:])
    tokens = [token for output in outputs for token in output.new_token_ids]
    return tokens, outputs[0].prompt_logprobs, outputs[-1].num_cached_tokens


@pytest.fixture(scope="session")
def prompt_oracle():
    return toy_model.make_prompt_oracle()


def check_logprobs(logprobs: PromptLogprobs, num_top: int, prompt: list[int], expected: torch.Tensor) -> None:
    assert (logprobs.num_top, len(logprobs)) == (num_top, len(prompt) - 1)
    for token, entry, row in zip(prompt[1:], logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        # Rounding may decide the order of nearly equal log-probabilities.
        assert int((row > row[token] + 1e-3).sum()) < entry.rank <= int((row > row[token] - 1e-3).sum())
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)
        assert values == pytest.approx([float(row[other]) for other, _ in entry.top], abs=1e-3)
        assert len(dict(entry.top)) == num_top


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CONFIGS)
async def test_prompt_logprobs_equal_the_oracle_for_all_settings(name, device, toy_spec, oracle, prompt_oracle):
    settings = {**BASE, **CONFIGS[name], "device": device, "forbid_sync": device == "cuda"}
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**settings))
    rng, requests = random.Random(1), make_requests(len(name))

    async def arrive(request: Request):
        # Delays would prevent preemptions: a GPU would finish some requests before others arrive.
        await asyncio.sleep(0 if name.startswith("preempted") else rng.random() * 0.05)
        return await serve(engine, request)

    try:
        answers = await asyncio.gather(*map(arrive, requests))
        assert (engine.stats.num_preemptions > 0) == name.startswith("preempted")
    finally:
        await engine.stop()
    for request, (tokens, logprobs, num_cached) in zip(requests, answers, strict=True):
        if not request.sampling.presence_penalty:
            assert tokens == oracle(request.prompt_ids.tolist(), OUTPUT_LEN)
        num_top = request.sampling.prompt_logprobs
        if num_top is None:
            assert logprobs is None
            continue
        assert num_cached == 0
        check_logprobs(logprobs, num_top, request.prompt_ids.tolist(), prompt_oracle(request.prompt_ids.tolist()))


async def test_a_prompt_with_logprobs_reads_no_cached_blocks_but_registers_its_own(toy_spec, oracle, prompt_oracle):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**BASE, device="cpu"))
    prompt = [*range(50)]

    def make_request(name: str, num_top: int | None) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=num_top)
        return Request(name, prompt, sampling)

    try:
        answers = [
            await serve(engine, make_request(f"r{index}", num_top)) for index, num_top in enumerate((2, 2, None))
        ]
    finally:
        await engine.stop()
    assert [num_cached for _, _, num_cached in answers] == [0, 0, 48]
    assert [tokens for tokens, _, _ in answers] == [oracle(prompt, 5)] * 3
    for _, logprobs, _ in answers[:2]:
        check_logprobs(logprobs, 2, prompt, prompt_oracle(prompt))


@pytest.mark.gpu
async def test_only_steps_with_prompt_logprobs_run_without_graphs(toy_spec, oracle):
    settings = {**BASE, "device": "cuda", "graph_mode": "full", "forbid_sync": True}
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(**settings))
    plain = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with_logprobs = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=1)
    num_steps = engine._loop._runner.graphs.num_steps

    try:
        plain_task = asyncio.create_task(serve(engine, Request("a", [1, 2, 3], plain)))
        while not engine.stats.generation_tokens:
            await asyncio.sleep(0)
        num_without_graphs = num_steps["none", "prompt"]
        tokens, _, _ = await serve(engine, Request("b", [4, 5, 6], with_logprobs))
        assert (await plain_task)[0] == oracle([1, 2, 3], 100)
    finally:
        await engine.stop()
    assert tokens == oracle([4, 5, 6], 5)
    assert num_steps["none", "prompt"] == num_without_graphs + 1
    assert num_steps["none", "decode"] == 0
