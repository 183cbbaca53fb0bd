"""OpenAI's Python client against a real server process with a real model."""

import asyncio
import json
import re
import urllib.request

import openai
import pytest
import torch

from nanovllm_models import load_tokenizer

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [{"role": "user", "content": "What is the capital of France? Tell me about it."}]


@pytest.fixture
async def sdk(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


def metrics(server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    return {
        found[1]: float(found[2])
        for line in text.splitlines()
        if (found := re.match(r'nanovllm:(\w+)\{model_name="[^"]*"\} (\S+)', line))
    }


async def create(sdk, **fields):
    return await sdk.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0} | fields)


async def test_greedy_answers_equal_transformers(sdk, default_model, load_reference, reference_generate):
    tokenizer = load_tokenizer(default_model)
    prompt = tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False).tolist()
    expected = reference_generate(load_reference(default_model, torch.float32, "cpu"), prompt, 24).tokens
    answer = await create(sdk, max_tokens=24, extra_body={"ignore_eos": True})
    assert answer.choices[0].message.content == tokenizer.decode(expected)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 24
    assert answer.choices[0].finish_reason == "length"


async def test_streamed_pieces_join_to_the_complete_answer(sdk):
    whole = await create(sdk, max_tokens=20)
    stream = await create(sdk, max_tokens=20, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5


async def test_stop_string_across_tokens_is_found(sdk):
    answer = await create(sdk, max_tokens=40, stop=["tal of Fr"])
    assert answer.choices[0].message.content == "The capi"
    assert answer.choices[0].finish_reason == "stop"


async def test_answers_consist_of_allowed_tokens(sdk, default_model):
    tokenizer = load_tokenizer(default_model)
    allowed = [tokenizer.encode(word, add_special_tokens=False).tolist()[0] for word in (" Paris", " London", " the")]
    extra = {"allowed_token_ids": allowed, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = (await create(sdk, max_tokens=8, logprobs=True, extra_body=extra)).choices
    assert set(choice.token_ids) <= {*allowed}
    assert choice.finish_reason == "length"
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
    # A structured output may end, although `allowed_token_ids` lacks the end token.
    extra = {"allowed_token_ids": allowed, "structured_outputs": {"choice": [" Rome", " Paris"]}}
    (choice,) = (await create(sdk, max_tokens=8, extra_body=extra)).choices
    assert (choice.message.content, choice.finish_reason) == (" Paris", "stop")
    extra["structured_outputs"] = {"choice": ["Rome", "Berlin"]}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids has no token that the grammar allows"):
        await create(sdk, max_tokens=8, extra_body=extra)


async def test_logprobs_are_sorted_and_their_bytes_join_to_the_answer(sdk):
    answer = await create(sdk, max_tokens=8, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 8
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token
    text = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert text == answer.choices[0].message.content


async def test_logprobs_of_an_answer_equal_those_in_a_prompt(sdk, default_model):
    tokenizer = load_tokenizer(default_model)
    fields = {"logprobs": True, "extra_body": {"ignore_eos": True}}
    generated_choice = (await create(sdk, max_tokens=10, **fields)).choices[0]
    messages = [*MESSAGES, {"role": "assistant", "content": generated_choice.message.content}]
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    extra |= {"add_generation_prompt": False, "continue_final_message": True}
    answer = await create(sdk, messages=messages, n=2, max_tokens=1, extra_body=extra)
    token_ids, (first, *prompt_entries) = answer.prompt_token_ids, answer.prompt_logprobs
    assert first is None
    assert len(token_ids) == len(prompt_entries) + 1 == answer.usage.prompt_tokens
    own_entries = [entry[str(token)] for token, entry in zip(token_ids[1:], prompt_entries, strict=True)]
    text = "<|im_start|>" + "".join(one["decoded_token"] for one in own_entries)
    assert text == tokenizer.render_chat(MESSAGES) + generated_choice.message.content
    entries = generated_choice.logprobs.content
    assert [one["decoded_token"] for one in own_entries[-10:]] == [entry.token for entry in entries]
    assert [one["logprob"] for one in own_entries[-10:]] == pytest.approx(
        [entry.logprob for entry in entries], abs=1e-3
    )
    assert [one["rank"] for one in own_entries[-10:]] == [1] * 10
    assert all({one["rank"] for one in entry.values()} >= {1, 2} for entry in prompt_entries)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_equal_seeds_give_equal_choices(sdk):
    fields = {"max_tokens": 12, "n": 3, "seed": 5, "temperature": 1.0}
    first, second = await create(sdk, **fields), await create(sdk, **fields)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


async def test_a_repeated_prompt_hits_the_prefix_cache(sdk):
    content = "Count with me: " + " ".join(str(number) for number in range(40))
    messages = [{"role": "user", "content": content}]
    await create(sdk, messages=messages, max_tokens=1)
    again = await create(sdk, messages=messages, max_tokens=1)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert again.usage.prompt_tokens - 32 <= cached < again.usage.prompt_tokens
    other = await create(sdk, messages=messages, max_tokens=1, extra_body={"cache_salt": "somebody else"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0


async def test_requests_beyond_max_num_seqs_wait_for_a_row(sdk):
    answers = await asyncio.gather(*(create(sdk, max_tokens=6, extra_body={"ignore_eos": True}) for _ in range(12)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_frees_everything(sdk, server, stream):
    request_task = asyncio.create_task(create(sdk, max_tokens=400, stream=stream, extra_body={"ignore_eos": True}))
    if stream:
        response = await request_task
        await anext(aiter(response))
        await response.close()
    else:
        while metrics(server)["num_requests_running"] == 0:
            await asyncio.sleep(0.02)
        request_task.cancel()
    async with asyncio.timeout(60):
        while metrics(server)["num_requests_running"] or metrics(server)["kv_cache_usage_perc"]:
            await asyncio.sleep(0.05)


async def test_a_prompt_longer_than_the_context_is_a_400(sdk):
    with pytest.raises(openai.BadRequestError) as refused:
        await create(sdk, messages=[{"role": "user", "content": "long " * 600}])
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as refused:
        await create(sdk, max_tokens=500)
    assert refused.value.param == "max_tokens"


async def test_answer_without_max_tokens_fills_the_context(sdk):
    answer = await create(sdk, extra_body={"ignore_eos": True}, messages=[{"role": "user", "content": "a " * 440}])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


def test_health_is_ok_and_models_list_the_served_model(server):
    with urllib.request.urlopen(f"{server.url}/health") as response:
        assert json.load(response) == {"status": "ok"}
    with urllib.request.urlopen(f"{server.url}/v1/models") as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 512)
