"""The arguments of a call as one element a parameter: values typed by the schema, as `parsing.typed` reads them back.

Strings stand as they are, other values as JSON. Nothing within a value may look like its end. This room must not know
what stands around the parameters.
"""

from nanovllm_models.chat_formats import XmlCalls
from nanovllm_server.constraint.patterns import avoid
from nanovllm_server.constraint.structure import (
    Part,
    any_text,
    either,
    json_value,
    literal,
    optional,
    regex,
    repeated,
    sequence,
)
from nanovllm_server.parsing.source import MAX_NAME
from nanovllm_server.parsing.typed import resolved, types_of
from nanovllm_server.protocol.error import ApiError, unsupported
from nanovllm_server.protocol.json import JSON

# Of a function whose parameters have no names.
MAX_UNNAMED = 16
NAME = r"[a-zA-Z_][a-zA-Z0-9_]{0,63}"
# What a schema of parameters may say beside annotations.
KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"})
LENGTHS = frozenset({"minLength", "maxLength"})
# Keywords whose values are no schemas.
VALUES = frozenset({"const", "enum", "default", "examples"})


def parameters(form: XmlCalls, schema: JSON, path: str) -> Part:
    """The elements of all parameters, those that aren't required optional, in the order of the schema.

    schema: an object's, checked. Raises ApiError (400) for what can't be written or told apart in such elements.
    """
    root = schema if isinstance(schema, dict) else {}
    unknown = root.keys() - KNOWN - ANNOTATIONS
    if unknown:
        raise _impossible(f"{path}.{min(unknown)}")
    properties, required = root.get("properties"), root.get("required")
    if not isinstance(properties, dict) or not properties:
        return _unnamed(form, root, path)
    needed = required if isinstance(required, list) else []
    parts: list[Part] = []
    for key, value in properties.items():
        where = f"{path}.properties.{key}"
        if key.strip() != key or not 0 < len(key) <= MAX_NAME or "\n" in key or form.key_end in key:
            raise _impossible(where)
        if value is False:
            continue
        part = _element(form, literal(key), _value(form, value, root, where))
        parts.append(part if key in needed else optional(part))
    if missing := [key for key in needed if key not in properties]:
        raise _impossible(f"{path}.required ({missing[0]})")
    return sequence(*parts) if parts else literal("")


def _unnamed(form: XmlCalls, root: dict[str, JSON], path: str) -> Part:
    """Parameters of any names: none unless the schema is one of any object."""
    if root.get("required"):
        raise _impossible(f"{path}.required")
    # As in JSON: what a schema with properties doesn't name doesn't come.
    value = root.get("additionalProperties", "properties" not in root)
    if value is False:
        return literal("")
    part = _value(form, value, root, f"{path}.additionalProperties")
    return repeated(_element(form, regex(NAME), part), MAX_UNNAMED)


def _element(form: XmlCalls, key: Part, value: Part) -> Part:
    edge = literal("\n") if form.newlines else literal("")
    begin = sequence(literal(form.parameter_begin), key, literal(form.key_end), edge)
    return sequence(begin, value, edge, literal(f"{form.parameter_end}\n"))


def _value(form: XmlCalls, schema: JSON, root: dict[str, JSON], path: str) -> Part:
    types = types_of(schema, root)
    if "string" in types:
        texts = _texts(form, schema, root, path)
        if not texts:
            raise _impossible(path)
        return either([*texts, literal("null")] if "null" in types else texts)
    embedded = _without_end(form, schema, path)
    if isinstance(embedded, dict):
        for name in ("$defs", "definitions"):
            if name in root and name not in embedded:
                embedded[name] = _without_end(form, root[name], f"{path}.{name}")
    return json_value(embedded, (form.parameter_end,))


def _texts(form: XmlCalls, schema: JSON, root: dict[str, JSON], path: str) -> list[Part]:
    """What strings a schema takes, as they stand; other values aren't told from them, and so left out."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return []
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if isinstance(branches, list):
            return [text for branch in branches for text in _texts(form, branch, root, f"{path}.{name}")]
    if "allOf" in schema:
        raise _impossible(f"{path}.allOf")
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(constants, list):
        return [literal(text) for text in constants if isinstance(text, str) and form.parameter_end not in text]
    kinds = schema.get("type")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return []
    pattern, length = schema.get("pattern"), _length(schema)
    if not isinstance(pattern, str):
        return [any_text((form.parameter_end,)) if length is None else regex(f"[^{form.parameter_end[0]}]{length}")]
    if length is not None:
        raise _impossible(f"{path}.pattern, beside a length")
    return [regex(_avoiding(pattern, form.parameter_end[0], f"{path}.pattern"))]


def _without_end(form: XmlCalls, schema: JSON, path: str) -> JSON:
    """The same schema, but that strings which have a pattern or a length can't hold what ends a value."""
    if isinstance(schema, list):
        return [_without_end(form, item, f"{path}[{index}]") for index, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    held = {
        name: value if name in VALUES else _without_end(form, value, f"{path}.{name}") for name, value in schema.items()
    }
    first, length = form.parameter_end[0], _length(schema)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        held["pattern"] = _avoiding(pattern, first, f"{path}.pattern")
    elif length is not None:
        for name in LENGTHS:
            held.pop(name, None)
        held["pattern"] = rf'^[^{first}"\\\x00-\x1f]{length}$'
    return held


def _length(schema: dict[str, JSON]) -> str | None:
    """How often a character may come, as a regular expression has it."""
    if not schema.keys() & LENGTHS:
        return None
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"{{{least},{most}}}"


def _avoiding(pattern: str, character: str, path: str) -> str:
    avoiding = avoid(pattern, character)
    if avoiding is None:
        raise _impossible(path)
    return avoiding


def _impossible(path: str) -> ApiError:
    return unsupported(path, f"{path} can't be enforced in the format of this model's calls: leave it out")
