"""Chat templates of real models: the detected format parses the calls that the template writes."""

import json
import subprocess
from itertools import takewhile

import pytest
from transformers import PreTrainedTokenizerFast

from nanovllm_models import Tokenizer
from nanovllm_models.chat_formats import detect_chat_format
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.parsing.events import CallArguments, CallBegun, ReasoningText
from nanovllm_server.parsing.model_format import ModelFormat
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.messages import Message, PastToolCall
from nanovllm_server.protocol.template import TemplateOptions

pytestmark = pytest.mark.slow

# The templates have different licences, so the tests download a package instead of copying the templates.
PACKAGE = "xinference==4.1.0"

# Templates of these models write calls only if content is null, but the renderer replaces null by "".
MODELS_WITHOUT_PAST_CALLS = {"deepseek-r1", "deepseek-r1-distill-llama"}
# By model: reasoning format, tool call format, whether prompts begin reasoning, whether prompts show tools.
MODELS = {
    "qwen3": ("think", "hermes", False, True),
    "Qwen3-Thinking": ("think", "hermes", True, True),
    "Qwen3-Next-Thinking": ("think", "hermes", True, True),
    "Qwen3-Next-Instruct": (None, "hermes", False, True),
    "Qwen3-Coder": (None, "qwen3_coder", False, True),
    "qwen3.5": ("think", "qwen3_coder", True, True),
    "MiniMax-M2": ("think", "minimax_m2", True, True),
    "MiniMax-M2.5": ("think", "minimax_m2", True, True),
    "deepseek-r1": ("think", "deepseek_r1", True, False),
    "deepseek-r1-0528": ("think", "deepseek_r1", False, True),
    "deepseek-r1-0528-qwen3": ("think", "deepseek_r1", False, False),
    "deepseek-r1-distill-llama": ("think", "deepseek_r1", True, False),
    "deepseek-r1-distill-qwen": ("think", "deepseek_r1", True, False),
    "llama-3.1-instruct": (None, "llama", False, True),
    "llama-3.3-instruct": (None, "llama", False, True),
}
# By model: words that identify the messages whose content the template leaves out.
OMITTED_CONTENT = {
    "MiniMax-M2": "system",
    "MiniMax-M2.5": "system",
    "deepseek-r1": "system",
    "deepseek-r1-distill-llama": "system",
    "llama-3.1-instruct": "tool_calls",
    "llama-3.3-instruct": "tool_calls",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
ARGUMENTS = {"city": 'Zürich <b> "x"', "days": 3}
QUESTION = Message(role="user", content="What is the weather?")
CALL_MESSAGE = Message(
    role="assistant",
    content=None,
    reasoning="I had better look.",
    tool_calls=(PastToolCall("call_0", "get_weather", json.dumps(ARGUMENTS)),),
)
RESULT_MESSAGE = Message(role="tool", content="Rain.", tool_call_id="call_0")


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("templates")
    subprocess.run(["uv", "pip", "install", "--quiet", "--no-deps", f"--target={target}", PACKAGE], check=True)
    files = [target / f"xinference/model/llm/models/{name}.json" for name in MODELS]
    # The releases of a model share one template.
    return {file.stem: json.loads(file.read_bytes())[0]["chat_template"] for file in files}


@pytest.fixture(params=MODELS)
def model(request, templates, tokenizer_backend):
    template = templates[request.param]
    hf_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_backend, bos_token="<|start|>", eos_token="<|end|>"
    )
    renderer = Renderer(
        Tokenizer(hf_tokenizer, template), reasoning_format=detect_chat_format(None, template).reasoning
    )
    yield request.param, template, renderer
    renderer.close()


async def test_format_is_detected_from_the_template(model):
    name, template, renderer = model
    reasoning, calls, begins, shows_tools = MODELS[name]
    form = detect_chat_format(None, template)
    assert (form.reasoning and form.reasoning.name) == reasoning
    assert form.tool_calls.name == calls
    prompt = (await renderer.render([QUESTION])).text
    assert prompt.rstrip().endswith("<think>") == begins
    assert ("The weather." in (await renderer.render([QUESTION], [TOOL])).text) == shows_tools


async def test_several_system_messages_are_rendered(model):
    _, _, renderer = model
    contents = ("Be brief.", "Be polite.")
    prompt = (await renderer.render([*(Message(role="system", content=text) for text in contents), QUESTION])).text
    assert [prompt.count(text) for text in contents] == [1, 1]


def test_omitted_content_is_found(model):
    name, _, renderer = model
    omitted = renderer.find_omitted_content()
    assert len(omitted) == (name in OMITTED_CONTENT)
    assert all(OMITTED_CONTENT[name] in messages for messages in omitted)


async def test_rendered_earlier_call_is_readable_by_the_parser(model, tokenizer_backend):
    name, template, renderer = model
    model_format = ModelFormat(detect_chat_format(None, template), TextVocabulary(tokenizer_backend))
    first_prompt = (await renderer.render([QUESTION], [TOOL])).text
    later_prompt = (await renderer.render([QUESTION, CALL_MESSAGE, RESULT_MESSAGE], [TOOL])).text
    assert "Rain." in later_prompt
    num_shared_characters = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first_prompt, later_prompt, strict=False))
    )
    # A "<" at the end of the shared text may begin two different tags. The parser needs the whole tag.
    num_shared_characters -= first_prompt[:num_shared_characters].endswith("<")
    reasoning_state = model_format.reasoning_state(first_prompt[:num_shared_characters])
    parser = model_format.make_parser(reasoning_state, {"get_weather": SCHEMA})
    events = parser.push(later_prompt[num_shared_characters:]) + parser.finish()
    names = [event.name for event in events if isinstance(event, CallBegun)]
    assert names == ([] if name in MODELS_WITHOUT_PAST_CALLS else ["get_weather"])
    if not names:
        return
    assert json.loads("".join(event.text for event in events if isinstance(event, CallArguments))) == ARGUMENTS
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    # Some templates leave out the reasoning of earlier answers.
    assert reasoning in ("", CALL_MESSAGE.reasoning)
    assert (reasoning == CALL_MESSAGE.reasoning) == (CALL_MESSAGE.reasoning in later_prompt)


async def test_two_parallel_calls_and_their_results_are_rendered(model):
    name, _, renderer = model
    cities, weathers = ("Zürich", "Oslo"), ("Rain.", "Snow.")
    calls = tuple(
        PastToolCall(f"call_{index}", "get_weather", json.dumps({"city": city}, ensure_ascii=False))
        for index, city in enumerate(cities)
    )
    results = [Message(role="tool", content=text, tool_call_id=f"call_{index}") for index, text in enumerate(weathers)]
    messages = [QUESTION, Message(role="assistant", content=None, tool_calls=calls), *results]
    prompt = (await renderer.render(messages, [TOOL])).text
    assert all(weather in prompt for weather in weathers)
    if name not in MODELS_WITHOUT_PAST_CALLS:
        assert all(city in prompt for city in cities)


async def test_cut_off_call_is_rendered_or_is_a_400_that_names_the_arguments(model):
    name, _, renderer = model
    path = "messages[1].tool_calls[0].function.arguments"
    call_message = Message(
        role="assistant", content=None, tool_calls=(PastToolCall("call_0", "get_weather", '{"city": "Zü', path),)
    )
    messages = [QUESTION, call_message, RESULT_MESSAGE]
    if MODELS[name][1] in ("qwen3_coder", "minimax_m2"):
        with pytest.raises(ApiError) as refused:
            await renderer.render(messages, [TOOL])
        assert (refused.value.status, refused.value.param) == (400, path)
    else:
        assert "Rain." in (await renderer.render(messages, [TOOL])).text


async def test_cut_off_reasoning_is_continued_or_is_a_400(model, tokenizer_backend):
    name, template, renderer = model
    messages = [QUESTION, Message(role="assistant", content=None, reasoning="I think that")]
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    reasoning, _, begins, _ = MODELS[name]
    if reasoning is None:
        with pytest.raises(ApiError) as refused:
            await renderer.render(messages, None, options)
        assert (refused.value.status, refused.value.param) == (400, "messages[1].reasoning")
        return
    prompt = await renderer.render(messages, None, options)
    first_prompt = (await renderer.render([QUESTION])).text
    assert prompt.text == first_prompt + ("" if begins else "<think>\n") + "I think that"
    model_format = ModelFormat(detect_chat_format(None, template), TextVocabulary(tokenizer_backend))
    assert model_format.reasoning_state(prompt.text, prompt.continued_text) == "open"
