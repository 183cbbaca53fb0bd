"""Fields that OpenAI's API does not have: their effects on prompt, engine and answer."""

import asyncio
import json

import pytest
from contract import check_refusal
from sse import parse_events


async def post_complete_and_streamed(post, **fields):
    """Checks that the stream equals the complete answer."""
    whole = await (await post(**fields)).get_json()
    chunks = parse_events(await (await post(**fields, stream=True)).get_data())
    streamed = []
    for index in range(fields.get("n", 1)):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        tokens = [token for choice in choices for token in choice.get("token_ids", ())]
        streamed.append((text, choices[-1]["finish_reason"], choices[-1]["stop_reason"], tokens))
    complete = [
        (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"], choice.get("token_ids", []))
        for choice in whole["choices"]
    ]
    assert streamed == complete
    return whole, chunks


@pytest.mark.parametrize("burst", [1, 3, 50])
@pytest.mark.parametrize(
    ("fields", "text", "stop_reason"),
    [
        ({"stop": "lo"}, "Hello", "lo"),
        ({"stop": ["o w", "zz"]}, "Hello w", "o w"),
        ({"stop": "zz"}, "Hello world", None),
        ({"stop_token_ids": [ord("w")]}, "Hello w", ord("w")),
        ({"stop": "l", "n": 2}, "Hel", "l"),
    ],
    ids=str,
)
async def test_include_stop_keeps_the_stop_in_the_text(post, engine, fields, text, stop_reason, burst):
    engine.reply, engine.burst = [*b"Hello world"], burst
    whole, _ = await post_complete_and_streamed(post, include_stop_str_in_output=True, **fields)
    for choice in whole["choices"]:
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert choice["stop_reason"] == stop_reason
    plain_answer, _ = await post_complete_and_streamed(post, **fields)
    assert len(plain_answer["choices"][0]["message"]["content"]) < len(text) or stop_reason is None


@pytest.mark.parametrize("burst", [1, 50])
async def test_special_tokens_may_be_shown(post, engine, burst):
    engine.reply, engine.burst = [*b"a", 258, *b"b"], burst
    assert (await post_complete_and_streamed(post))[0]["choices"][0]["message"]["content"] == "ab"
    for spaces in (True, False):
        shown, _ = await post_complete_and_streamed(
            post, skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert shown["choices"][0]["message"]["content"] == "a<|start|>b"
    shown, _ = await post_complete_and_streamed(post, skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown["choices"][0]["message"]["content"] == "a<|start|>b<|end|>"


@pytest.mark.parametrize("burst", [1, 3, 50])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": "lo"}, {"max_tokens": 2}, {"logprobs": True}], ids=str)
async def test_token_ids_are_returned_on_request(post, engine, tokenizer, burst, fields):
    engine.burst = burst
    whole, chunks = await post_complete_and_streamed(post, return_token_ids=True, **fields)
    assert whole["prompt_token_ids"] == tokenizer.encode("<|start|>user:hi", add_special_tokens=False).tolist()
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [whole["prompt_token_ids"]] + [None] * (
        len(chunks) - 1
    )
    expected = [*b"Hello", 259][: {"stop": 5, "max_tokens": 2}.get(next(iter(fields), ""), 6)]
    for choice in whole["choices"]:
        assert choice["token_ids"] == expected
    assert whole["usage"]["completion_tokens"] == len(expected) * len(whole["choices"])


async def test_token_ids_are_absent_by_default(post):
    whole, chunks = await post_complete_and_streamed(post)
    assert "token_ids" not in json.dumps([whole, chunks])


@pytest.mark.parametrize(("limit", "num_kept"), [(1, 1), (5, 5), (400, 8), (-1, 8)])
async def test_truncation_keeps_the_end_of_the_prompt(post, engine, tokenizer, limit, num_kept):
    body = await (await post(truncate_prompt_tokens=limit, return_token_ids=True)).get_json()
    prompt = tokenizer.encode("<|start|>user:hi", add_special_tokens=False).tolist()
    assert body["prompt_token_ids"] == engine.requests[0].prompt_ids.tolist() == prompt[-num_kept:]
    assert body["usage"]["prompt_tokens"] == num_kept


@pytest.mark.parametrize(("fields", "num_kept"), [({}, 511), ({"max_tokens": 12}, 500)])
async def test_truncation_keeps_as_many_tokens_as_fit(post, engine, fields, num_kept):
    messages = [{"role": "user", "content": "x" * 600}]
    assert (await post(messages=messages, **fields)).status_code == 400
    response = await post(messages=messages, truncate_prompt_tokens=-1, **fields)
    assert response.status_code == 200
    assert len(engine.requests[0].prompt_ids) == num_kept


async def test_bad_words_reach_the_engine_with_and_without_leading_space(post, engine):
    await post(bad_words=["the", " the", "he"])
    forbidden = engine.requests[0].sampling.forbidden_sequences
    assert forbidden == ((ord("t"), 256), (257, 256), (256,), (ord(" "), 256))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False, None)),
        ({"add_generation_prompt": False}, (False, False, None)),
        ({"continue_final_message": True}, (False, True, None)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True, None)),
        ({"documents": [{"title": "a", "text": "b"}]}, (True, False, ({"title": "a", "text": "b"},))),
        ({"documents": []}, (True, False, ())),
    ],
    ids=str,
)
async def test_template_options_reach_the_template(post, tokenizer, fields, expected):
    assert (await post(**fields)).status_code == 200
    assert tokenizer.turn_options[-1] == expected


async def test_allowed_token_ids_reach_the_engine(post, engine):
    assert (await post(allowed_token_ids=[5, 319.0, 5])).status_code == 200
    assert engine.requests[0].sampling.allowed_token_ids == (5, 319, 5)
    assert (await post(allowed_token_ids=None)).status_code == 200
    assert engine.requests[1].sampling.allowed_token_ids == ()


async def test_grammar_that_permits_no_allowed_token_is_a_400_that_says_so(post, engine):
    task = asyncio.create_task(post(allowed_token_ids=[5], structured_outputs={"choice": ["a"]}))
    engine.delay = 0.05
    while not engine.keys:
        await asyncio.sleep(0.001)
    engine.refuse_grammar(engine.keys[0], "allowed_token_ids has no token that the grammar allows")
    error = await check_refusal(await task, 400, "structured_outputs.choice")
    assert "allowed_token_ids" in error["message"]


@pytest.mark.parametrize("fields", [{}, {"n": 2, "top_logprobs": 2}, {"stop": "lo"}], ids=str)
async def test_tokens_of_logprobs_may_be_named_by_id(post, fields):
    by_text, _ = await post_complete_and_streamed(post, logprobs=True, **fields)
    by_id, chunks = await post_complete_and_streamed(post, logprobs=True, return_tokens_as_token_ids=True, **fields)

    def entries(choice):
        for entry in (choice["logprobs"] or {}).get("content", []):
            yield entry
            yield from entry["top_logprobs"]

    for choice, other in zip(by_text["choices"], by_id["choices"], strict=True):
        for entry, other_entry in zip(entries(choice), entries(other), strict=True):
            assert other_entry["token"].startswith("token_id:")
            assert other_entry["bytes"] == entry["bytes"]
            if entry["bytes"] and entry["bytes"][0] < 128:
                assert other_entry["token"] == f"token_id:{entry['bytes'][0]}"
        streamed = [
            entry
            for chunk in chunks
            if chunk["choices"][0]["index"] == choice["index"]
            for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
        ]
        assert streamed == other["logprobs"]["content"]


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"return_token_ids": True}], ids=str)
async def test_every_chunk_has_the_usage_so_far_on_request(post, engine, burst, fields):
    engine.burst, engine.delay = burst, 0.005
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = parse_events(await (await post(stream=True, stream_options=options, **fields)).get_data())
    num_characters = previous_count = 0
    for chunk in chunks:
        usage = chunk["usage"]
        num_characters += sum(len(choice["delta"].get("content") or "") for choice in chunk["choices"])
        # The usage may already count tokens of later chunks.
        assert usage["completion_tokens"] >= max(num_characters, previous_count)
        previous_count = usage["completion_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert chunks[0]["usage"]["completion_tokens"] < previous_count == 6 * fields.get("n", 1)
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]


@pytest.mark.parametrize(
    ("options", "usages"),
    [
        ({"include_usage": True, "continuous_usage_stats": False}, {None}),
        ({"include_usage": False, "continuous_usage_stats": True}, {"absent"}),
    ],
    ids=str,
)
async def test_chunks_have_no_usage_without_both_options(post, options, usages):
    chunks = parse_events(await (await post(stream=True, stream_options=options)).get_data())
    assert {chunk.get("usage", "absent") for chunk in chunks if chunk["choices"]} == usages
