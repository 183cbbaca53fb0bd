"""How each family writes its reasoning and its tool calls, as data, and which of these ways a checkpoint has.

A family writes what its chat template shows it, so that the template decides. Where that says nothing of tools, whoever
renders it has to show the model a format, and the architecture only says which one it may know. This room must not know
how text is parsed or constrained: it only holds the words.
"""

from dataclasses import dataclass
from pathlib import Path

from nanovllm_models.fields import read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning at the beginning of an answer, between two tags. Some templates write the first one into the prompt."""

    name: str
    begin: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls as one JSON object each, with `name` and the arguments under one of the keys `arguments`.

    begin, end: the tags around a call; no `end` when the object's own is the call's. bare: `begin` may be left out.
    separator: what may stand between calls, beside whitespace. ends_reasoning: a call ends reasoning that has no end
    tag. marks: what a chat template of this format has, all of it.
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
    """Calls in a block from `begin` to `end`: each its kind, its name on a line, and its arguments as fenced JSON."""

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
    """Calls in a block from `begin` to `end`: each a named element with one named element a parameter.

    newlines: a line break at either end of a value is not part of it. shared: one block holds all calls of an answer.
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
    """What a model writes beside plain text; None where it writes no such thing."""

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
    # Later models of DeepSeek have the same tags around other contents.
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

# Most particular first: templates of the first have the marks of the second too.
TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    known.name: known for known in (QWEN3_CODER, HERMES, MINIMAX_M2, DEEPSEEK_R1, LLAMA)
}

# What models of these were trained to write; to others that their template shows no tools, one way is like another.
ARCHITECTURES: dict[str, ToolCallFormat] = {
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "DeepseekV3ForCausalLM": DEEPSEEK_R1,
}


def pick_format(architecture: str | None, template: str) -> ChatFormat:
    """The format of a model of that architecture with that chat template ("" for none)."""
    reasoning = next((known for known in REASONING_FORMATS.values() if known.end in template), None)
    calls = next((known for known in TOOL_CALL_FORMATS.values() if all(mark in template for mark in known.marks)), None)
    # A template that shows the model calls as nobody here knows them has it write those.
    if calls is None and "tool" not in template:
        calls = ARCHITECTURES.get(architecture or "", HERMES)
    return ChatFormat(reasoning, calls)


def find_format(path: Path, template: str) -> ChatFormat:
    """The format of the model in a directory, for the chat template that it is served with. Raises ModelError."""
    architectures = read_fields(path / "config.json").texts("architectures")
    return pick_format(architectures[0] if architectures else None, template)
