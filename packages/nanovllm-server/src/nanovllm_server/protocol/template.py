"""Reads the fields of a request that control the chat template."""

from dataclasses import dataclass, field

from nanovllm_server.protocol.error import ApiError, bad_field
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.reasoning import ReasoningOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """Options of the chat template.

    add_generation_prompt: the prompt ends with the beginning of the model's turn.
    continue_final_message: the prompt ends within the last message, which the model continues.
    """

    variables: dict[str, JSON] = field(default_factory=dict[str, JSON])
    documents: tuple[dict[str, JSON], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def parse_template_options(body: FieldReader, reasoning: ReasoningOptions) -> TemplateOptions:
    """Reads the template options of a request. Raises ApiError."""
    continue_final_message = body.boolean("continue_final_message") or False
    add_generation_prompt = body.boolean("add_generation_prompt")
    if continue_final_message and add_generation_prompt:
        message = (
            "add_generation_prompt and continue_final_message can't both be true: a prompt ends in a new turn or in "
            "the last message"
        )
        raise ApiError(400, message, param="add_generation_prompt", code="invalid_value")
    return TemplateOptions(
        variables=_read_variables(body, reasoning),
        documents=_read_documents(body),
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
    )


def _read_variables(body: FieldReader, reasoning: ReasoningOptions) -> dict[str, JSON]:
    # Set both variables: some templates read `reasoning_effort`, and other templates read `enable_thinking`.
    values: dict[str, JSON] = {"reasoning_effort": reasoning.effort, "enable_thinking": reasoning.is_enabled}
    variables = {name: value for name, value in values.items() if value is not None}
    return {**variables, **(body.mapping("chat_template_kwargs") or {})}


def _read_documents(body: FieldReader) -> tuple[dict[str, JSON], ...] | None:
    items = body.array("documents", "an array of objects", items={"type": "object"})
    if items is None:
        return None
    documents: list[dict[str, JSON]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise bad_field(f"documents[{index}]", 'an object like {"title": "...", "text": "..."}', item)
        documents.append(item)
    return tuple(documents)
