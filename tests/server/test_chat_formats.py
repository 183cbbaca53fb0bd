import openai
import pytest
from messages import TEMPLATE_OMITS_CONTENT

pytestmark = pytest.mark.slow

FLAGS = ("--max-model-len", "1024", "--cpu-cache-gib", "0.05", "--served-model-name", "tiny")
FIELDS = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 1}
TOOLS = [{"type": "function", "function": {"name": "ping"}}]
# This template begins reasoning in the prompt unless reasoning is disabled. It shows tools in an unknown format.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tools | tojson }}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{# </think> #}"
)


# This template leaves out the content of messages with calls.
SHORT_TEMPLATE = "{% for message in messages if not message.tool_calls %}{{ message.content }}\n{% endfor %}"


async def test_the_template_and_the_flags_decide_the_chat_format(run_server, tiny_model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = (*FLAGS, "--chat-template", str(template))
    with run_server(tiny_model, *flags, "--tool-call-parser", "hermes") as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as sdk:
            extra = {"ignore_eos": True}
            answer = await sdk.chat.completions.create(**FIELDS, tools=TOOLS, extra_body=extra)
            message = answer.choices[0].message
            assert (message.content, answer.choices[0].finish_reason) == (None, "length")
            assert message.reasoning
            assert answer.usage.completion_tokens_details.reasoning_tokens == 9
            stream = await sdk.chat.completions.create(**FIELDS, tools=TOOLS, stream=True, extra_body=extra)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(delta.reasoning for delta in deltas if hasattr(delta, "reasoning")) == message.reasoning
            assert not any(delta.content for delta in deltas)
            answer = await sdk.chat.completions.create(**FIELDS, reasoning_effort="none", extra_body=extra)
            assert answer.choices[0].message.content
            assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    with run_server(tiny_model, *flags, "--reasoning-parser", "none") as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as sdk:
            answer = await sdk.chat.completions.create(**FIELDS, extra_body=extra)
            assert answer.choices[0].message.content
            with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
                await sdk.chat.completions.create(**FIELDS, tools=TOOLS)


async def test_log_warns_of_content_that_the_template_leaves_out(run_server, tiny_model):
    with run_server(tiny_model, *FLAGS, "--chat-template", SHORT_TEMPLATE, "--http-workers", "2") as server:
        pass
    (warning,) = [line for line in server.errors if TEMPLATE_OMITS_CONTENT in line]
    assert "messages with tool_calls" in warning
