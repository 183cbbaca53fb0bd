import orjson
import pytest

from nanovllm_server.protocol.request import Limits, SamplingDefaults, parse_chat_request

LIMITS = Limits(max_model_len=512, vocab_size=320, max_sequences=8)
TEXT = "x" * 10_000
SCHEMA = {"type": "object", "properties": {TEXT: {}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
        {"prediction": {"type": "content", "content": TEXT}},
        {"documents": [{"text": TEXT}]},
        {"chat_template_kwargs": {"x": TEXT}},
        {"structured_outputs": {"json": SCHEMA}},
        {TEXT: 1},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
def test_without_contents_a_request_holds_no_text_of_its_body(fields):
    body = {"messages": [{"role": "user", "content": TEXT}], **fields}
    chat = parse_chat_request(orjson.dumps(body), LIMITS, SamplingDefaults())
    assert repr(chat).count(TEXT) > 1
    assert TEXT not in repr(chat.without_contents())
