from types import SimpleNamespace

import pytest
from sse import parse_events

from nanovllm_server.protocol.response import Clock


async def test_complete_answer_has_all_fields(post):
    response = await post()
    body = await response.get_json()
    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/json"
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "scripted"
    assert body["system_fingerprint"].startswith("nanovllm-async-")
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 6,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@pytest.mark.parametrize("n", [1, 3])
async def test_usage_has_the_drafts_of_all_choices(post, engine, n):
    engine.num_drafts, engine.burst, engine.delay = (3, 2), 4, 0.005
    expected = {"reasoning_tokens": 0, "accepted_prediction_tokens": 3 * n, "rejected_prediction_tokens": 2 * n}
    body = await (await post(n=n)).get_json()
    assert body["usage"]["completion_tokens_details"] == expected
    assert body["usage"]["completion_tokens"] == 6 * n
    options = {"include_usage": True, "continuous_usage_stats": True}
    *_, last = parse_events(await (await post(n=n, stream=True, stream_options=options)).get_data())
    assert last["usage"]["completion_tokens_details"] == expected


@pytest.mark.parametrize("burst", [1, 2, 7])
async def test_deltas_of_a_stream_join_to_the_answer(post, engine, burst):
    engine.burst = burst
    chunks = parse_events(await (await post(stream=True)).get_data())
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[0]["finish_reason"] is None
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello"
    assert [choice["finish_reason"] for choice in choices[1:]] == [None] * (len(choices) - 2) + ["stop"]
    assert choices[-1]["delta"] == {}
    for name in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_is_an_uncached_event_stream(post):
    response = await post(stream=True)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"


async def test_last_chunk_has_the_usage_on_request(post):
    chunks = parse_events(await (await post(stream=True, stream_options={"include_usage": True})).get_data())
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 14
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_tokens_that_are_ready_together_are_one_chunk(post, engine):
    engine.burst = 6
    chunks = parse_events(await (await post(stream=True)).get_data())
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {},
    ]


def join_chunks(chunks, index=0):
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    return {
        "index": index,
        "message": {
            "role": choices[0]["delta"]["role"],
            "content": "".join(choice["delta"].get("content", "") for choice in choices),
            "refusal": None,
        },
        "logprobs": {"content": entries, "refusal": None} if entries else None,
        "finish_reason": choices[-1]["finish_reason"],
        "stop_reason": choices[-1]["stop_reason"],
    }


@pytest.mark.parametrize("burst", [1, 3, 50])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": "lo"},
        {"stop": ["o w", "xyz"]},
        {"stop": ["\U0001f600"]},
        {"max_tokens": 3},
        {"max_tokens": 14},
        {"n": 3, "stop": "w"},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "stop": "lo wo", "max_tokens": 9},
        {"stop_token_ids": [ord("w")], "logprobs": True},
    ],
    ids=str,
)
async def test_stream_equals_complete_answer(post, engine, fields, burst):
    engine.reply = [*"Hello wörld 😀!".encode()]
    whole = await (await post(**fields)).get_json()
    engine.burst = burst
    chunks = parse_events(await (await post(**fields, stream=True, stream_options={"include_usage": True})).get_data())
    assert [join_chunks(chunks, index) for index in range(fields.get("n", 1))] == whole["choices"]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_stop_string_ends_the_answer(post, engine, service):
    engine.endless = True
    body = await (await post(stop=["oHe", "zzz"])).get_json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Hell"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "oHe")
    assert body["usage"]["completion_tokens"] == 7
    assert engine.aborted == [engine.keys[0]]
    assert service.admission.num_active == 0


async def test_stop_strings_have_no_effect_before_min_tokens(post, engine):
    engine.reply = [*b"a!b!c"]
    (choice,) = (await (await post(stop="!", min_tokens=3)).get_json())["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("a!b", "!")


async def test_stop_token_ends_the_answer(post):
    body = await (await post(stop_token_ids=[ord("o")])).get_json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Hell"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("o"))
    assert body["usage"]["completion_tokens"] == 5


async def test_max_tokens_ends_the_answer_by_length(post):
    body = await (await post(max_completion_tokens=2)).get_json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "He"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


async def test_n_choices_are_answered(post, engine):
    body = await (await post(n=3, seed=7, temperature=0)).get_json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9]
    assert len({request.id for request in engine.requests}) == 3
    assert body["usage"]["prompt_tokens"] == 8
    assert body["usage"]["completion_tokens"] == 18


async def test_choices_are_interleaved_in_the_stream(post, engine):
    engine.delay = 0.005
    chunks = parse_events(await (await post(n=2, stream=True)).get_data())
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


async def test_seeds_stay_in_range(post, engine):
    await post(n=2, seed=2**63 - 1)
    assert [request.sampling.seed for request in engine.requests] == [2**63 - 1, -(2**63)]


async def test_logprobs_are_returned_per_token(post, engine):
    engine.reply = [*"é".encode(), 256]
    body = await (await post(logprobs=True, top_logprobs=2)).get_json()
    half, rest, he, end = body["choices"][0]["logprobs"]["content"]
    assert (half["bytes"], rest["bytes"], he["bytes"]) == ([0xC3], [0xA9], [*b"he"])
    assert he["token"] == "he"
    assert he["logprob"] == -0.5
    assert [top["logprob"] for top in he["top_logprobs"]] == [-0.5, -1.5]
    assert (end["token"], end["bytes"]) == ("<|end|>", None)


async def test_sampling_parameters_reach_the_engine(post, engine, service):
    service.allow_priority = True
    await post(
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"5": -100},
        min_tokens=1,
        max_tokens=5,
        ignore_eos=True,
        stop_token_ids=[3],
        priority=-2,
        cache_salt="tenant",
    )
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.2)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({5: -100.0}, (3,))
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (1, 5, True)
    assert (request.priority, request.cache_salt) == (-2, "tenant")


async def test_messages_reach_the_template(post, tokenizer):
    await post(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                    {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"cut'}},
                ],
            },
        ]
    )
    messages = tokenizer.rendered[-1]
    assert messages[0] == {"role": "system", "content": "be brief"}
    assert messages[1] == {"role": "user", "content": "a\nb", "name": "bob"}
    assert messages[2]["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in messages[2]["tool_calls"]] == [{"x": 1}, '{"cut']


def test_created_never_goes_back(monkeypatch):
    times = iter([2000.0, 1000.0, 2001.0])
    monkeypatch.setattr("nanovllm_server.protocol.response.time", SimpleNamespace(time=lambda: next(times)))
    clock = Clock()
    assert [clock.now() for _ in range(3)] == [2000, 2000, 2001]
