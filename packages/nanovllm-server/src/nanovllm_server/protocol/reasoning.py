"""Reads the fields that control reasoning. Clients of other servers use other names for the same options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from nanovllm_server.protocol.error import bad_field
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import describe_value

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

OptionValue = TypeVar("OptionValue", str, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Options of reasoning.

    effort: requested effort; None for the chat template's default.
    is_enabled: whether the model may reason; None for the chat template's default.
    max_tokens: maximum number of reasoning tokens; None for no limit.
    max_tokens_field: path of the request's field that sets `max_tokens`, for errors.
    """

    effort: str | None
    is_enabled: bool | None
    max_tokens: int | None
    max_tokens_field: str
    is_included: bool


def parse_reasoning(body: FieldReader) -> ReasoningOptions:
    """Reads OpenAI's and vLLM's fields, and OpenRouter's object `reasoning`. Raises ApiError."""
    fields = body.child("reasoning") or FieldReader({}, "reasoning")
    effort, effort_field = _require_common_value(
        ("reasoning_effort", body.one_of("reasoning_effort", EFFORTS)),
        ("reasoning.effort", fields.one_of("effort", EFFORTS)),
    )
    max_tokens, max_tokens_field = _require_common_value(
        ("max_reasoning_tokens", body.integer("max_reasoning_tokens", 0)),
        ("thinking_token_budget", _read_thinking_token_budget(body)),
        ("reasoning.max_tokens", fields.integer("max_tokens", 0)),
    )
    is_enabled = fields.boolean("enabled")
    if effort is not None:
        if is_enabled not in (None, effort != "none"):
            raise fields.wrong("enabled", f'left out when {effort_field} is "{effort}"')
        is_enabled = effort != "none"
    include_reasoning, is_excluded = body.boolean("include_reasoning"), fields.boolean("exclude")
    if include_reasoning is not None and include_reasoning == is_excluded:
        raise fields.wrong("exclude", f"left out when include_reasoning is {describe_value(include_reasoning)}")
    return ReasoningOptions(
        effort=effort,
        is_enabled=is_enabled,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        is_included=include_reasoning is not False and not is_excluded,
    )


def _read_thinking_token_budget(body: FieldReader) -> int | None:
    budget = body.integer("thinking_token_budget", -1)
    return None if budget == -1 else budget


def _require_common_value(*fields_of_option: tuple[str, OptionValue | None]) -> tuple[OptionValue | None, str]:
    """Returns (common value, path of the first given field). Raises ApiError if two fields have different values."""
    given_fields: Sequence[tuple[str, OptionValue]] = [
        (path, value) for path, value in fields_of_option if value is not None
    ]
    if not given_fields:
        return None, fields_of_option[0][0]
    first_path, first_value = given_fields[0]
    for path, value in given_fields[1:]:
        if value != first_value:
            raise bad_field(path, f"left out or the same as {first_path} ({first_value})", value)
    return first_value, first_path
