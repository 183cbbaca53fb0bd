"""The formats in which model families write reasoning and tool calls, as data; and which format a checkpoint has.

The server parses and constrains text by this data.
"""

from dataclasses import dataclass
from pathlib import Path

from nanovllm_models.fields import read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning at the beginning of an answer, between two tags.

    name: name of the format.
    begin: tag before the reasoning; some templates write it into the prompt.
    end: tag after the reasoning.
    """

    name: str
    begin: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Tool calls, each written as one JSON object with the function's `name` and its arguments.

    name: name of the format.
    marks: texts that a chat template of this format contains, all of them.
    begin: tag before a call.
    end: tag after a call; None if the call ends with its JSON object.
    arguments: keys under which a call may have its arguments.
    bare: whether a call may come without `begin`.
    separator: text that may stand between two calls, besides whitespace.
    ends_reasoning: whether a call ends reasoning that has no end tag.
    """

    name: str
    marks: tuple[str, ...]
    begin: str
    end: str | None
    arguments: tuple[str, ...]
    bare: bool = False
    separator: str = ""
    ends_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedCalls:
    """Tool calls in one block, each written as its kind, its function's name and its arguments as fenced JSON.

    name, marks, separator, ends_reasoning: as in `JsonCalls`.
    begin, end: tags around the block.
    call_begin, call_end: tags around one call.
    kind: text after `call_begin`.
    name_begin: tag between the kind and the function's name, which ends with its line.
    fence_begin, fence_end: lines around the JSON of the arguments.
    """

    name: str
    marks: tuple[str, ...]
    begin: str
    end: str
    call_begin: str
    kind: str
    name_begin: str
    fence_begin: str
    fence_end: str
    call_end: str
    separator: str = ""
    ends_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCalls:
    """Tool calls in blocks, each written as an element with the function's name and one element per parameter.

    name, marks, separator, ends_reasoning: as in `JsonCalls`.
    begin, end: tags around a block.
    call_begin, name_end, call_end: texts before the function's name, after it, and after the call.
    parameter_begin, key_end, parameter_end: texts before a parameter's name, after it, and after its value.
    newlines: whether a line break at either end of a value is not part of the value.
    shared: whether one block holds all calls of an answer; otherwise each call has a block of its own.
    """

    name: str
    marks: tuple[str, ...]
    begin: str
    end: str
    call_begin: str
    name_end: str
    call_end: str
    parameter_begin: str
    key_end: str
    parameter_end: str
    newlines: bool
    shared: bool
    separator: str = ""
    ends_reasoning: bool = False


ToolCallFormat = JsonCalls | FencedCalls | XmlCalls


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of one model; None for reasoning or tool calls that the model does not write."""

    reasoning: ReasoningFormat | None
    tool_calls: ToolCallFormat | None


THINK = ReasoningFormat(name="think", begin="<think>", end="</think>")

HERMES = JsonCalls(
    name="hermes",
    marks=("<tool_call>", '{"name": '),
    begin="<tool_call>",
    end="</tool_call>",
    arguments=("arguments", "parameters"),
    ends_reasoning=True,
)

QWEN3_CODER = XmlCalls(
    name="qwen3_coder",
    marks=("<tool_call>", "<function=", "<parameter="),
    begin="<tool_call>",
    end="</tool_call>",
    call_begin="<function=",
    name_end=">",
    call_end="</function>",
    parameter_begin="<parameter=",
    key_end=">",
    parameter_end="</parameter>",
    newlines=True,
    shared=False,
    ends_reasoning=True,
)

MINIMAX_M2 = XmlCalls(
    name="minimax_m2",
    marks=("<minimax:tool_call>", '<invoke name="'),
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call_begin='<invoke name="',
    name_end='">',
    call_end="</invoke>",
    parameter_begin='<parameter name="',
    key_end='">',
    parameter_end="</parameter>",
    newlines=False,
    shared=True,
)

DEEPSEEK_R1 = FencedCalls(
    name="deepseek_r1",
    # Later models of DeepSeek write other contents between the same tags: the fence is what tells them apart.
    marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
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
    marks=('{"name": ', '"parameters": '),
    begin="<|python_tag|>",
    end=None,
    arguments=("parameters", "arguments"),
    bare=True,
    separator=";",
)

REASONING_FORMATS = {known.name: known for known in (THINK,)}

# The order matters: a template of QWEN3_CODER may also contain the marks of HERMES.
TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    known.name: known for known in (QWEN3_CODER, HERMES, MINIMAX_M2, DEEPSEEK_R1, LLAMA)
}

# The format that models of an architecture were trained to write. It is used where the chat template shows no tools.
ARCHITECTURES: dict[str, ToolCallFormat] = {
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "DeepseekV3ForCausalLM": DEEPSEEK_R1,
}


def pick_format(architecture: str | None, template: str) -> ChatFormat:
    """Return the format of a model.

    architecture: name from config.json; None if it names none.
    template: the chat template that the model is served with; "" for none.
    """
    reasoning = next((known for known in REASONING_FORMATS.values() if known.end in template), None)
    calls = next((known for known in TOOL_CALL_FORMATS.values() if all(mark in template for mark in known.marks)), None)
    # A template that mentions tools shows a format of its own: the model writes that one, even if it is unknown here.
    if calls is None and "tool" not in template:
        calls = ARCHITECTURES.get(architecture or "", HERMES)
    return ChatFormat(reasoning, calls)


def find_format(path: Path, template: str) -> ChatFormat:
    """Return the format of the model in the directory `path`, for the chat template that it is served with.

    Raises ModelError.
    """
    architectures = read_fields(path / "config.json").texts("architectures")
    return pick_format(architectures[0] if architectures else None, template)
