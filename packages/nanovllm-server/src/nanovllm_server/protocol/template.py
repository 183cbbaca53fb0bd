"""Reads the fields of a request that are options of the chat template."""

from dataclasses import dataclass, field

from nanovllm_server.protocol.error import ApiError, bad_field
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import JSON

EFFORTS = ("none", "minimal", "low", "medium", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """Options of the chat template.

    values: further variables of the template.
    documents: documents for retrieval; None for none.
    add_generation_prompt: the prompt ends with the beginning of the model's turn.
    continue_final_message: the prompt ends within the last message, which the model continues.
    """

    values: dict[str, JSON] = field(default_factory=dict[str, JSON])
    documents: tuple[dict[str, JSON], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def parse_template(body: FieldReader) -> TemplateOptions:
    """Reads the template options of a request. Raises ApiError."""
    continued = body.boolean("continue_final_message") or False
    begin_turn = body.boolean("add_generation_prompt")
    if continued and begin_turn:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message can't both be true: a prompt ends in a new turn or in "
            "the last message",
            param="add_generation_prompt",
            code="invalid_value",
        )
    return TemplateOptions(
        values=_values(body),
        documents=_documents(body),
        add_generation_prompt=not continued if begin_turn is None else begin_turn,
        continue_final_message=continued,
    )


def _values(body: FieldReader) -> dict[str, JSON]:
    effort = body.one_of("reasoning_effort", EFFORTS)
    values: dict[str, JSON] = {}
    if effort is not None:
        # A template uses one or the other.
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    own = body.raw("chat_template_kwargs", {"type": "object"})
    if own is not None and not isinstance(own, dict):
        raise body.wrong("chat_template_kwargs", "an object")
    return {**values, **(own or {})}


def _documents(body: FieldReader) -> tuple[dict[str, JSON], ...] | None:
    items = body.array("documents", "an array of objects", items={"type": "object"})
    if items is None:
        return None
    documents: list[dict[str, JSON]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise bad_field(f"documents[{index}]", 'an object like {"title": "...", "text": "..."}', item)
        documents.append(item)
    return tuple(documents)
