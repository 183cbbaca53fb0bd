"""Refuses fields of other servers' APIs that would change the answer. Values without effect are allowed."""

from nanovllm_server.protocol.error import unsupported
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import JSON

# Values without effect, by unsupported field. null never has an effect.
HARMLESS_VALUES: dict[str, tuple[JSON, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "functions": (),
    "function_call": ("none",),
    "logits_processors": (),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# The field to use instead, by unsupported field.
REPLACEMENTS: dict[str, str] = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_decoding_backend": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs",
    "structural_tag": "structured_outputs.structural_tag",
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
}


def refuse_unsupported(body: FieldReader) -> None:
    """Raises ApiError (400) for the first unsupported field."""
    for name, replacement in REPLACEMENTS.items():
        if body.raw(name, {"enum": [None]}) is not None:
            raise unsupported(name, f"{name} is not supported: use {replacement}")
    for name, harmless_values in HARMLESS_VALUES.items():
        value = body.raw(name, {"enum": [None, *harmless_values]})
        if value is not None and not any(_is_same(value, harmless) for harmless in harmless_values):
            raise unsupported(name, f"{name} is not supported: leave it out{_suggest_values(harmless_values)}")


def _is_same(value: JSON, other: JSON) -> bool:
    # In Python, 1 == True. A client that sends 1 instead of true must get an error.
    return type(value) is type(other) and value == other


def _suggest_values(values: tuple[JSON, ...]) -> str:
    match values:
        case (bool() as value,):
            return f" or set it to {'true' if value else 'false'}"
        case (str() as value,):
            return f' or set it to "{value}"'
        case _:
            return ""
