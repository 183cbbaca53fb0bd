"""Refuses unsupported fields of other servers' APIs. Values that do not change the answer are allowed."""

import orjson

from nanovllm_server.protocol.error import unsupported
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import JSON

# For each unsupported field: values that are allowed because they have no effect. null is always allowed.
HARMLESS_VALUES: dict[str, tuple[JSON, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "custom_logit_processor": (),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "echo": (False,),
    "function_call": ("none",),
    "length_penalty": (1,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "lora_path": (),
    "lora_request": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "stop_regex": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

# For each unsupported field: the field to use instead.
REPLACEMENTS: dict[str, str] = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "guided_decoding_backend": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs",
    "structural_tag": "structured_outputs.structural_tag",
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "reasoning.enabled",
    "thinking": "reasoning.enabled",
    "thinking_budget": "max_reasoning_tokens",
    "repeat_penalty": "repetition_penalty",
    "functions": "tools",
    "function_call": "tool_choice",
}


def refuse_unsupported(body: FieldReader) -> None:
    """Raises ApiError (400) for the first unsupported field."""
    for name in (*REPLACEMENTS, *HARMLESS_VALUES):
        harmless_values = HARMLESS_VALUES.get(name, ())
        value = body.raw(name, {"enum": [None, *harmless_values]})
        if value is None or any(_is_same(value, harmless) for harmless in harmless_values):
            continue
        replacement = REPLACEMENTS.get(name)
        remedy = f"use {replacement}" if replacement else f"leave it out{_suggest_values(harmless_values)}"
        raise unsupported(name, f"{name} is not supported: {remedy}")


def _is_same(value: JSON, other: JSON) -> bool:
    # In Python, 0 == False and 1 == True. A client that sends 0 instead of false must get an error.
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _suggest_values(values: tuple[JSON, ...]) -> str:
    return f" or set it to {orjson.dumps(values[0]).decode()}" if values else ""
