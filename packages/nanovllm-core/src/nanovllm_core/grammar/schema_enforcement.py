"""Converts the JSON schemas and regular expressions of a grammar to a form that xgrammar enforces completely."""

import msgspec
import orjson

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.schemas.conversion import convert_schema
from nanovllm_core.grammar.schemas.document import escape_pointer_part
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.pattern_writer import rewrite_pattern
from nanovllm_core.grammar.schemas.regex import RegexError
from nanovllm_core.grammar.xml_parameters import XmlParameters, build_any_elements, build_elements
from nanovllm_core.grammar_types import GrammarSpec, ParameterTypes

# Maximum size of a grammar's source after the conversion.
MAX_CONVERTED_BYTES = 1 << 20


class EnforceableGrammar(msgspec.Struct, frozen=True):
    """A grammar with converted JSON schemas and regular expressions.

    parameter_types: types of the values in XML parameters.
    rules: the result of `compiler.write_rules`; also None before the rules are written.
    """

    spec: GrammarSpec
    parameter_types: ParameterTypes
    rules: str | None = None


def convert_grammar(spec: GrammarSpec) -> EnforceableGrammar:
    """Converts the JSON schemas and the regular expressions of a grammar. Raises GrammarError.

    This function limits neither time nor memory: call it in a child process with such limits (`vetting_process.py`).

    Besides xgrammar's fields, a structural tag may contain:
    "place", beside "json_schema": where the client's request has the schema, for errors (see `GrammarSpec.place`).
    "objects_only", beside "json_schema": if true, excludes values other than objects.
    a format of type "xml_parameters", which `convert_grammar` replaces by formats that xgrammar knows.
    """
    if spec.kind == "ebnf":
        return EnforceableGrammar(spec, {})
    if spec.kind == "regex":
        pattern = _convert_regex(spec.source, "this regular expression")
        _check_converted_size(pattern.encode())
        return EnforceableGrammar(GrammarSpec("regex", pattern), {})
    try:
        source: JSON = orjson.loads(spec.source)
    except orjson.JSONDecodeError as error:
        name = "JSON schema" if spec.kind == "json_schema" else "structural tag"
        raise GrammarError(f"this {name} can't be compiled: {error}") from error
    types_by_place: ParameterTypes = {}
    if spec.kind == "json_schema":
        converted: JSON = convert_schema(source, spec.place)
    else:
        converted = _convert_tag(source, spec.place, types_by_place)
    encoded = orjson.dumps(converted)
    _check_converted_size(encoded)
    return EnforceableGrammar(GrammarSpec(spec.kind, encoded.decode()), types_by_place)


def _check_converted_size(encoded: bytes) -> None:
    if len(encoded) > MAX_CONVERTED_BYTES:
        raise GrammarError(
            f"with its schemas and patterns written out, this grammar has {len(encoded)} bytes, but may have at most "
            f"{MAX_CONVERTED_BYTES}: make it shorter"
        )


def _convert_regex(pattern: str, name: str) -> str:
    """Convert a pattern for xgrammar. name: the pattern's name in an error message."""
    try:
        return rewrite_pattern(pattern)
    except RegexError as error:
        raise GrammarError(
            f"{name} can't be enforced: {error}; use only characters, classes, groups, alternatives, quantifiers, and "
            "^ and $ at the ends"
        ) from error


def _convert_tag(value: JSON, place: str, types_by_place: ParameterTypes) -> JSON:
    """Convert the schemas and patterns in a part of a structural tag.

    types_by_place: receives the types of XML parameters.
    """
    if isinstance(value, list):
        return [_convert_tag(item, f"{place}/{index}", types_by_place) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "xml_parameters":
        return _convert_xml_parameters(value, place, types_by_place)
    converted = {
        name: _convert_tag(item, f"{place}/{escape_pointer_part(name)}", types_by_place)
        if name != "json_schema"
        else item
        for name, item in value.items()
    }
    pattern = value.get("pattern")
    if value.get("type") == "regex" and isinstance(pattern, str):
        converted["pattern"] = _convert_regex(pattern, f"the regular expression at {place}/pattern")
    schema = value.get("json_schema")
    if isinstance(schema, dict | bool):
        schema_place = str(converted.pop("place", f"{place}/json_schema"))
        convert = _convert_objects_only if converted.pop("objects_only", False) else convert_schema
        converted["json_schema"] = convert(schema, schema_place)
    return converted


def _convert_xml_parameters(value: dict[str, JSON], place: str, types_by_place: ParameterTypes) -> JSON:
    try:
        parameters = msgspec.convert(value, XmlParameters)
    except msgspec.ValidationError as error:
        raise GrammarError(f"the format xml_parameters at {place} is wrong: {error}") from error
    if parameters.json_schema is None:
        return build_any_elements(parameters)
    schema_place = parameters.place or f"{place}/json_schema"
    schema = _convert_objects_only(parameters.json_schema, schema_place)
    elements, types_by_place[schema_place] = build_elements(parameters, schema, schema_place)
    return elements


def _convert_objects_only(schema: JSON, place: str) -> dict[str, JSON]:
    """Convert `schema`, and exclude values other than objects."""
    converted = convert_schema(schema, place)
    if not converted:
        return {"type": "object", "additionalProperties": {}}
    if converted.get("type") == "object":
        return converted
    branches = converted.get("anyOf")
    object_branches = [
        branch
        for branch in (branches if isinstance(branches, list) else [])
        if isinstance(branch, dict) and branch.get("type") == "object"
    ]
    if not object_branches:
        raise GrammarError(f"{place} must be a schema that allows an object", place, "invalid_schema")
    return {**converted, "anyOf": list[JSON](object_branches)}
