"""Refuses fields of other servers' APIs that would change the answer. Values without an effect are allowed."""

from nanovllm_server.protocol.error import unsupported
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import JSON

NOTHING: tuple[JSON, ...] = ()

# Fields that this server does not support, and the values (beside null) that have no effect.
FOREIGN: dict[str, tuple[JSON, ...]] = {
    "allowed_token_ids": NOTHING,
    "audio": NOTHING,
    "best_of": (1,),
    "chat_template": NOTHING,
    "echo": (False,),
    "functions": NOTHING,
    "function_call": ("none",),
    "logits_processors": NOTHING,
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    "web_search_options": NOTHING,
}

# Fields that this server does not support, and the field to use instead.
SUCCESSORS: dict[str, str] = {
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
    for name, successor in SUCCESSORS.items():
        if body.raw(name, {"enum": [None]}) is not None:
            raise unsupported(name, f"{name} is not supported: use {successor}")
    for name, harmless in FOREIGN.items():
        value = body.raw(name, {"enum": [None, *harmless]})
        if value is not None and not any(_same(value, other) for other in harmless):
            raise unsupported(name, f"{name} is not supported: leave it out{_or_harmless(harmless)}")


def _same(value: JSON, other: JSON) -> bool:
    # In Python, 1 == True; but a client that sends 1 for true should get an error.
    return type(value) is type(other) and value == other


def _or_harmless(values: tuple[JSON, ...]) -> str:
    match values:
        case (bool() as value,):
            return f" or set it to {'true' if value else 'false'}"
        case (str() as value,):
            return f' or set it to "{value}"'
        case _:
            return ""
