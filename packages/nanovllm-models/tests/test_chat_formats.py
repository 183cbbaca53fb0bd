import json

import pytest

from nanovllm_models import ModelError, read_chat_format
from nanovllm_models.chat_formats import (
    DEEPSEEK_R1,
    HERMES,
    LLAMA,
    MINIMAX_M2,
    QWEN3_CODER,
    REASONING_FORMATS,
    THINK,
    TOOL_CALL_FORMATS,
    ChatFormat,
    detect_chat_format,
)

QWEN3 = "{% if '</think>' in content %}{% endif %}{{- '<tool_call>\\n{\"name\": \"' }}{{- '\\n</tool_call>' }}"
CODER = "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + name + '>\\n' }}"
MINIMAX = (
    "{%- set begin = '<minimax:tool_call>' -%}{{- '<invoke name=\"' + tool_call.name + '\">' }}'<think>' '</think>'"
)
R1 = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '```json'}}{% if '</think>' %}"
)
LLAMA_3 = "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, ChatFormat(THINK, HERMES)),
        (QWEN3.replace("think", "thought"), ChatFormat(None, HERMES)),
        (CODER, ChatFormat(None, QWEN3_CODER)),
        (CODER + "<think>\n</think>", ChatFormat(THINK, QWEN3_CODER)),
        (QWEN3 + CODER, ChatFormat(THINK, QWEN3_CODER)),
        (MINIMAX, ChatFormat(THINK, MINIMAX_M2)),
        (R1, ChatFormat(THINK, DEEPSEEK_R1)),
        # DeepSeek-V3.1 has the same tags without code fences.
        (R1.replace("```json", ""), ChatFormat(THINK, None)),
        (LLAMA_3, ChatFormat(None, LLAMA)),
        (LLAMA_3 + "</think>", ChatFormat(THINK, LLAMA)),
        ("{{ message.content }}{{ tools }}", ChatFormat(None, None)),
    ],
)
def test_the_template_decides_the_format(template, expected):
    assert detect_chat_format(None, template) == expected
    # If the template mentions tools, the architecture must not matter.
    assert "tool" not in template or detect_chat_format("LlamaForCausalLM", template) == expected


def test_the_architecture_decides_if_the_template_does_not_mention_tools():
    assert detect_chat_format("MiniMaxM2ForCausalLM", "{{ message.content }}") == ChatFormat(None, MINIMAX_M2)
    assert detect_chat_format("DeepseekV3ForCausalLM", "{{ message.content }}</think>") == ChatFormat(
        THINK, DEEPSEEK_R1
    )
    assert detect_chat_format("MiniMaxM2ForCausalLM", "{{ message.tool_calls }}") == ChatFormat(None, None)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", None])
def test_an_unknown_architecture_without_tools_in_its_template_gets_hermes(architecture):
    assert detect_chat_format(architecture, "{{ message.content }}") == ChatFormat(None, HERMES)
    assert detect_chat_format(architecture, "{{ message.tool_calls }}") == ChatFormat(None, None)


def test_formats_are_in_the_tables_under_their_names():
    for table in (REASONING_FORMATS, TOOL_CALL_FORMATS):
        assert [name for name, known in table.items()] == [known.name for known in table.values()]


def test_the_architecture_comes_from_the_config_of_the_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MiniMaxM2ForCausalLM"]}))
    assert read_chat_format(tmp_path, "") == ChatFormat(None, MINIMAX_M2)
    (tmp_path / "config.json").write_text("{}")
    assert read_chat_format(tmp_path, QWEN3) == ChatFormat(THINK, HERMES)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError):
        read_chat_format(tmp_path, QWEN3)
