import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers.utils.chat_template_utils import _compile_jinja_template

from nanovllm_models import ModelError, TemplateError, TemplateValueError, load_tokenizer
from nanovllm_models.tokenizer import RESERVED_NAMES

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if think %}<think>{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def write_tokenizer(tmp_path):
    def write(template: str | list[dict[str, str]] | None):
        words = ["<s>", "</s>", "<unk>", "hello", "world"]
        backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens(["<s>", "</s>"])
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        backend.enable_truncation(2)
        backend.enable_padding(length=8, pad_id=1, pad_token="</s>")
        backend.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        if template is not None:
            config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_text_survives_encoding_and_decoding_despite_truncation_and_padding_in_the_file(write_tokenizer):
    tokenizer = load_tokenizer(write_tokenizer(None))
    assert tokenizer.encode("hello world hello", add_special_tokens=True).tolist() == [0, 3, 4, 3]
    assert tokenizer.encode("<s>hello", add_special_tokens=False).tolist() == [0, 3]
    assert tokenizer.decode([0, 3, 4]) == "hello world"
    assert tokenizer.decode([0, 3, 4], skip_special_tokens=False) == "<s> hello world"
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (5, 1)
    assert tokenizer.backend.token_to_id("world") == 4


def test_a_conversation_is_rendered_by_the_template(write_tokenizer):
    tokenizer = load_tokenizer(write_tokenizer(TEMPLATE))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(HELLO) == "<s>[user]hello[assistant]"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "<s>[user]hello"
    assert tokenizer.render_chat(HELLO, template_values={"think": True}) == "<s>[user]hello<think>[assistant]"
    tools = [{"type": "function", "function": {"name": "é"}}]
    assert tokenizer.render_chat(HELLO, tools=tools).endswith(json.dumps(tools, ensure_ascii=False) + "[assistant]")
    messages = [*HELLO, {"role": "assistant", "content": "wor"}]
    continued = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<s>[user]hello[assistant]wor"


def test_chat_template_is_the_source_of_the_template(write_tokenizer):
    assert load_tokenizer(write_tokenizer(TEMPLATE)).chat_template == TEMPLATE
    assert load_tokenizer(write_tokenizer(TEMPLATE), chat_template="x").chat_template == "x"
    assert load_tokenizer(write_tokenizer(None)).chat_template == ""
    named_templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert load_tokenizer(write_tokenizer(named_templates)).chat_template == "a\nb"


def test_the_callers_template_replaces_the_models_template(write_tokenizer):
    for model_template in (None, TEMPLATE):
        tokenizer = load_tokenizer(write_tokenizer(model_template), chat_template="{{ messages[0].content }}!")
        assert tokenizer.render_chat(HELLO) == "hello!"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, HELLO, "has no chat template"),
        ("{{ raise_exception('roles must\nalternate') }}", HELLO, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", HELLO, "refuses these messages"),
        ("{{ messages[0].nothing.more }}", HELLO, "refuses these messages"),
        ("{{ messages[7].content.x }}", HELLO, "refuses these messages"),
        ("{{ 1 // 0 }}", HELLO, "refuses these messages"),
        ("{% for %}", HELLO, "refuses these messages"),
        (TEMPLATE, [], "refuses these messages"),
    ],
)
def test_a_conversation_that_a_template_refuses_is_a_template_error_of_one_line(
    write_tokenizer, template, messages, message
):
    tokenizer = load_tokenizer(write_tokenizer(template))
    with pytest.raises(TemplateError) as caught:
        tokenizer.render_chat(messages)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "tokenize", "tools", "conversation", "conversations", "messages", "self"),
        *("namespace", "range", "dict", "raise_exception", "strftime_now"),
    ],
)
def test_template_values_cannot_have_reserved_names(write_tokenizer, name):
    with pytest.raises(TemplateValueError, match=f"{name} can't be given to the chat template: leave it out"):
        load_tokenizer(write_tokenizer(TEMPLATE)).render_chat(HELLO, template_values={name: "x"})


def test_names_of_the_template_environment_are_reserved():
    assert _compile_jinja_template("").environment.globals.keys() <= RESERVED_NAMES


def test_a_template_is_sandboxed(write_tokenizer):
    tokenizer = load_tokenizer(write_tokenizer("{{ messages.__class__.__mro__ }}"))
    with pytest.raises(TemplateError, match="unsafe"):
        tokenizer.render_chat(HELLO)


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelError, match="is not a directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelError, match="can't load the tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version":\n "1.0"}')
    with pytest.raises(ModelError, match="can't load the tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
