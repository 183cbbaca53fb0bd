"""The field `prediction`, whose tokens the engine may use as drafts."""

from dataclasses import replace

import pytest
from contract import check_refusal

TEXT_PARTS = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]


@pytest.fixture
def speculating_engine(engine):
    engine.info = replace(engine.info, draft_method="ngram")
    return engine


def prediction(content):
    return {"type": "content", "content": content}


@pytest.mark.parametrize(("content", "text"), [("the", "the"), ("", ""), (TEXT_PARTS, "Hello\nthere")], ids=str)
async def test_prediction_reaches_the_engine_as_token_ids(post, speculating_engine, tokenizer_backend, content, text):
    response = await post(prediction=prediction(content))
    assert response.status_code == 200
    (request,) = speculating_engine.requests
    assert request.prediction_ids.tolist() == tokenizer_backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"prompt_logprobs": 1, "max_completion_tokens": 4, "presence_penalty": 1},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)
async def test_prediction_and_any_other_option_may_be_combined(post, speculating_engine, fields):
    answers = [await post(**fields), await post(**fields, prediction=prediction("abc"))]
    assert [answer.status_code for answer in answers] == [200, 200]
    requests = speculating_engine.requests
    num_choices = fields.get("n", 1)
    for plain_request, request in zip(requests[:num_choices], requests[num_choices:], strict=True):
        assert request.prediction_ids.tolist() == [*b"abc"]
        assert request.sampling == plain_request.sampling
        assert request.prompt_ids.tolist() == plain_request.prompt_ids.tolist()


async def test_prediction_longer_than_the_context_is_refused(post, speculating_engine, service):
    max_tokens = speculating_engine.info.max_model_len
    assert (await post(prediction=prediction("a" * max_tokens))).status_code == 200
    # The server refuses the second text without encoding: the error has only a lower bound of the length.
    for num_characters, length in ((max_tokens + 1, str(max_tokens + 1)), (50_000, "at least")):
        response = await post(prediction=prediction("a" * num_characters))
        error = await check_refusal(response, 400, "prediction.content")
        assert error["code"] == "context_length_exceeded"
        assert f"at most {max_tokens} tokens" in error["message"]
        assert f"has {length}" in error["message"]
    assert len(speculating_engine.requests) == 1
    assert service.admission.num_active == 0


async def test_without_speculation_a_prediction_is_ignored(post, engine):
    assert (await post(prediction=prediction("a" * 50_000))).status_code == 200
    assert engine.requests[0].prediction_ids.tolist() == []


async def test_a_prediction_counts_towards_the_size_of_the_body(post, service, speculating_engine):
    service.max_body_bytes = 1000
    await check_refusal(await post(prediction=prediction("a" * 1000)), 413)
    assert speculating_engine.requests == []
