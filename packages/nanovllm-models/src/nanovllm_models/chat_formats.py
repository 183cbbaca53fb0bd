"""Describes how models write reasoning and tool calls."""

from dataclasses import dataclass
from pathlib import Path

from nanovllm_models.fields import read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning at the beginning of an answer, between two tags.

    name: value of the flag --reasoning-parser.
    begin, end: tags around the reasoning. Some templates write `begin` into the prompt.
    """

    name: str
    begin: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallFormat:
    """The fields of all formats of tool calls.

    name: value of the flag --tool-call-parser.
    template_markers: texts that every chat template of this format contains.
    separator: text that may stand between two calls, besides whitespace.
    ends_reasoning: whether the tag before a call also ends reasoning that lacks its own end tag.
    """

    name: str
    template_markers: tuple[str, ...]
    separator: str = ""
    ends_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(_CallFormat):
    """Tool calls, each written as one JSON object with the function's `name` and its arguments.

    begin: tag before a call.
    end: tag after a call; None if the call ends with its JSON object.
    argument_keys: accepted keys of the arguments; the first is the key to show to the model.
    may_omit_begin: whether a call may omit `begin`.
    """

    begin: str
    end: str | None
    argument_keys: tuple[str, ...]
    may_omit_begin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedCalls(_CallFormat):
    """Tool calls between two tags. Each call has a type, the function's name, and the arguments as fenced JSON.

    begin, end: tags around all calls.
    call_begin, call_end: tags around one call.
    kind: type of every call, written after `call_begin`.
    name_begin: tag between the type and the function's name. The name ends at the end of its line.
    fence_begin, fence_end: lines around the JSON of the arguments.
    """

    begin: str
    end: str
    call_begin: str
    kind: str
    name_begin: str
    fence_begin: str
    fence_end: str
    call_end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCalls(_CallFormat):
    """Tool calls as XML elements, with one element per parameter.

    begin, end: tags around a block of one or several calls.
    call_begin, name_end, call_end: texts before the function's name, after the name, and after the call.
    parameter_begin, key_end, parameter_end: texts before a parameter's name, after the name, and after the value.
    wraps_values_in_line_breaks: whether a line break precedes and follows each value.
    has_single_block: whether one block contains all calls of an answer; if False, each call has its own block.
    """

    begin: str
    end: str
    call_begin: str
    name_end: str
    call_end: str
    parameter_begin: str
    key_end: str
    parameter_end: str
    wraps_values_in_line_breaks: bool
    has_single_block: bool


ToolCallFormat = JsonCalls | FencedCalls | XmlCalls


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of one model.

    reasoning: None if the model writes no reasoning.
    tool_calls: None if the model makes no tool calls, or if their format is unknown.
    """

    reasoning: ReasoningFormat | None
    tool_calls: ToolCallFormat | None


THINK = ReasoningFormat(name="think", begin="<think>", end="</think>")

HERMES = JsonCalls(
    name="hermes",
    template_markers=("<tool_call>", '{"name": '),
    begin="<tool_call>",
    end="</tool_call>",
    argument_keys=("arguments", "parameters"),
    ends_reasoning=True,
)

QWEN3_CODER = XmlCalls(
    name="qwen3_coder",
    template_markers=("<tool_call>", "<function=", "<parameter="),
    begin="<tool_call>",
    end="</tool_call>",
    call_begin="<function=",
    name_end=">",
    call_end="</function>",
    parameter_begin="<parameter=",
    key_end=">",
    parameter_end="</parameter>",
    wraps_values_in_line_breaks=True,
    has_single_block=False,
    ends_reasoning=True,
)

MINIMAX_M2 = XmlCalls(
    name="minimax_m2",
    template_markers=("<minimax:tool_call>", '<invoke name="'),
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call_begin='<invoke name="',
    name_end='">',
    call_end="</invoke>",
    parameter_begin='<parameter name="',
    key_end='">',
    parameter_end="</parameter>",
    wraps_values_in_line_breaks=False,
    has_single_block=True,
)

DEEPSEEK_R1 = FencedCalls(
    name="deepseek_r1",
    # The fence is a marker because later models of DeepSeek use the same tags without a fence.
    template_markers=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    kind="function",
    name_begin="<｜tool▁sep｜>",
    fence_begin="```json",
    fence_end="```",
    call_end="<｜tool▁call▁end｜>",
)

LLAMA = JsonCalls(
    name="llama",
    template_markers=('{"name": ', '"parameters": '),
    begin="<|python_tag|>",
    end=None,
    argument_keys=("parameters", "arguments"),
    may_omit_begin=True,
    separator=";",
)

REASONING_FORMATS = {reasoning.name: reasoning for reasoning in (THINK,)}

# `detect_chat_format` takes the first match. QWEN3_CODER comes first: its templates may contain HERMES's markers.
TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    call_format.name: call_format for call_format in (QWEN3_CODER, HERMES, MINIMAX_M2, DEEPSEEK_R1, LLAMA)
}

# Maps an architecture to its format of tool calls, for chat templates that do not mention tools.
FORMAT_BY_ARCHITECTURE: dict[str, ToolCallFormat] = {
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "DeepseekV3ForCausalLM": DEEPSEEK_R1,
}


def detect_chat_format(architecture: str | None, template: str) -> ChatFormat:
    """Return the formats of a model.

    architecture: name from config.json; None if config.json has none.
    template: the chat template that the model is served with; "" for none.
    """
    reasoning = next((known for known in REASONING_FORMATS.values() if known.end in template), None)
    tool_calls = next(
        (known for known in TOOL_CALL_FORMATS.values() if all(marker in template for marker in known.template_markers)),
        None,
    )
    # A template that mentions tools tells the model how to write calls. If this format is unknown, no default applies.
    if tool_calls is None and "tool" not in template:
        tool_calls = FORMAT_BY_ARCHITECTURE.get(architecture or "", HERMES)
    return ChatFormat(reasoning, tool_calls)


def read_chat_format(path: Path, template: str) -> ChatFormat:
    """Return the formats of the model in `path`. template: the chat template; "" for none. Raises ModelError."""
    architectures = read_fields(path / "config.json").texts("architectures")
    return detect_chat_format(architectures[0] if architectures else None, template)
