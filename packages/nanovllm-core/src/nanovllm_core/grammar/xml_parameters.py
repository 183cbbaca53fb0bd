"""Translates the format "xml_parameters", which xgrammar lacks, to formats that xgrammar has.

The format writes each property of an object as an XML element: strings without quotation marks, other values as JSON.
No value may contain a tag at which parsers may end the value.
"""

from typing import Annotated, Any

import msgspec

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.schemas.characters import UNESCAPED_IN_JSON, intersect_ranges, invert_ranges
from nanovllm_core.grammar.schemas.declared_types import declared_types, follow_references
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.pattern_writer import write_json_string_pattern, write_pattern
from nanovllm_core.grammar.schemas.regex import NO_STRING, Node, parse, restrict_characters
from nanovllm_core.grammar.structural_tag import (
    TagFormat,
    any_text,
    either,
    json_value,
    literal,
    optional,
    regex,
    repeated,
    sequence,
)

# Maximum number of elements if the schema does not declare the properties.
MAX_UNDECLARED_ELEMENTS = 16
MAX_NAME_LENGTH = 256
MAX_SHOWN_NAME_LENGTH = 80
# Pattern of names of properties that the schema does not declare.
KEY_PATTERN = r"[a-zA-Z_][a-zA-Z0-9_]{0,63}"
# Keywords that this module supports in an object's schema, as `convert_schema` returns it.
KNOWN_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "$anchor"})
_NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class XmlParameters(msgspec.Struct, frozen=True, tag_field="type", tag="xml_parameters"):
    """A format that writes the properties of an object as elements, in the order of the schema.

    An element is `begin`, the property's name, `key_end`, the value, `end` and a line break.
    tags: texts that no value may contain.
    wraps_values_in_line_breaks: a line break precedes and follows the value.
    json_schema: schema of the object; None: properties may have any names, and any text as values.
    place: the schema's place in error messages; None for the JSON pointer to the schema in the structural tag.
    """

    begin: _NonEmpty
    key_end: _NonEmpty
    end: _NonEmpty
    tags: tuple[_NonEmpty, ...]
    wraps_values_in_line_breaks: bool
    json_schema: Any = None
    place: str | None = None

    def element(self, key: TagFormat, value: TagFormat) -> TagFormat:
        """The format of one element."""
        line_break = literal("\n" if self.wraps_values_in_line_breaks else "")
        return sequence(
            literal(self.begin), key, literal(self.key_end), line_break, value, line_break, literal(f"{self.end}\n")
        )


def build_any_elements(parameters: XmlParameters) -> TagFormat:
    """Elements with any names and any text as values."""
    return repeated(parameters.element(regex(KEY_PATTERN), any_text(parameters.tags)), MAX_UNDECLARED_ELEMENTS)


def build_elements(parameters: XmlParameters, schema: dict[str, JSON], place: str) -> tuple[TagFormat, dict[str, Any]]:
    """Returns (format of the elements, schema that states only the types of the values).

    schema: schema of the objects, as `convert_schema` returns it.
    Raises GrammarError for keywords, property names and patterns that elements can't express.
    """
    builder = _ElementBuilder(parameters, schema, place)
    branches = schema.get("anyOf")
    if not isinstance(branches, list):
        return builder.object_format(schema), builder.type_schema()
    formats = [builder.object_format(follow_references(branch, schema)) for branch in branches]
    return either(formats), builder.type_schema()


class _ElementBuilder:
    """Builds formats of elements. root: result of `convert_schema`, which contains the targets of references."""

    def __init__(self, parameters: XmlParameters, root: dict[str, JSON], place: str):
        self._parameters = parameters
        self._root = root
        self._place = place
        self._types_by_name: dict[str, set[str]] = {}
        self._undeclared_types: set[str] = set()

    def type_schema(self) -> dict[str, Any]:
        """A schema that states only the types of the values in all formats built so far."""
        properties = {key: {"type": sorted(types)} for key, types in self._types_by_name.items()}
        return {"properties": properties, "additionalProperties": {"type": sorted(self._undeclared_types)}}

    def object_format(self, schema: JSON) -> TagFormat:
        """The format of the elements for `schema`, a schema of objects."""
        if not isinstance(schema, dict):
            raise _unsupported_error(self._place)
        if unknown := schema.keys() - KNOWN_KEYWORDS:
            raise _unsupported_error(f"{self._place}/{min(unknown)}")
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return self._undeclared_elements(schema)
        required = schema.get("required")
        elements: list[TagFormat] = []
        for key, value in properties.items():
            place = f"{self._place}/properties/{key[:MAX_SHOWN_NAME_LENGTH]}"
            key_end = self._parameters.key_end
            if key.strip() != key or not 0 < len(key) <= MAX_NAME_LENGTH or "\n" in key or key_end in key:
                raise _unsupported_error(place)
            element = self._parameters.element(literal(key), self._value_format(value, place))
            elements.append(element if isinstance(required, list) and key in required else optional(element))
            types = declared_types(value, self._root)
            known = self._types_by_name.get(key, types)
            # If only some branches of `anyOf` allow a string, the output does not show whether the value is a string.
            # An empty set means that the types are unknown.
            types_agree = bool(known) and bool(types) and ("string" in known) == ("string" in types)
            self._types_by_name[key] = known | types if types_agree else set()
        return sequence(*elements)

    def _undeclared_elements(self, schema: dict[str, JSON]) -> TagFormat:
        """Elements with any names; the empty text if the schema allows no undeclared properties."""
        value = schema.get("additionalProperties", False)
        if value is False:
            return literal("")
        self._undeclared_types |= declared_types(value, self._root)
        element = self._parameters.element(
            regex(KEY_PATTERN), self._value_format(value, f"{self._place}/additionalProperties")
        )
        return repeated(element, MAX_UNDECLARED_ELEMENTS)

    def _value_format(self, schema: JSON, place: str) -> TagFormat:
        types = declared_types(schema, self._root)
        if "string" in types:
            texts = self._text_formats(schema, place)
            if not texts:
                raise _unsupported_error(place)
            return either([*texts, literal("null")] if "null" in types else texts)
        value = self._exclude_tags(schema, place)
        if isinstance(value, dict) and "$defs" in self._root:
            value = {**value, "$defs": self._exclude_tags(self._root["$defs"], place)}
        return json_value(value, self._parameters.tags)

    def _text_formats(self, schema: JSON, place: str) -> list[TagFormat]:
        """Formats of the strings that `schema` allows. Omits other values, which parsers would read as strings."""
        tags = self._parameters.tags
        match follow_references(schema, self._root):
            case {"anyOf": list(branches)}:
                return [text for branch in branches for text in self._text_formats(branch, place)]
            case {"enum": list(constants)}:
                texts = [text for text in constants if isinstance(text, str)]
                return [literal(text) for text in texts if not any(tag in text for tag in tags)]
            case {"type": "string", "pattern": str(pattern)}:
                return [
                    regex(write_pattern(self._exclude_from_pattern(pattern, place)).removeprefix("^").removesuffix("$"))
                ]
            case {"type": "string"}:
                return [any_text(tags)]
            case _:
                return []

    def _exclude_tags(self, schema: JSON, place: str) -> JSON:
        """Exclude the tags from the patterns in `schema`. xgrammar excludes the tags from other strings."""
        if isinstance(schema, list):
            return [self._exclude_tags(item, place) for item in schema]
        if not isinstance(schema, dict):
            return schema
        match schema:
            case {"type": "string", "pattern": str(pattern)}:
                return {**schema, "pattern": write_json_string_pattern(self._exclude_from_pattern(pattern, place))}
            case {"enum": list()}:
                return schema
            case {"type": "object", "patternProperties": _}:
                raise _unsupported_error(f"{place}/patternProperties")
            case _:
                return {name: self._exclude_tags(value, place) for name, value in schema.items()}

    def _exclude_from_pattern(self, pattern: str, place: str) -> Node:
        """Exclude the first characters of the tags from `pattern`, which `convert_schema` has written."""
        first_code_points = sorted({ord(tag[0]) for tag in self._parameters.tags})
        tree = restrict_characters(
            parse(pattern.removeprefix("^").removesuffix("$")),
            intersect_ranges(UNESCAPED_IN_JSON, invert_ranges(tuple((first, first) for first in first_code_points))),
        )
        if tree == NO_STRING:
            raise _unsupported_error(f"{place}/pattern")
        return tree


def _unsupported_error(place: str) -> GrammarError:
    message = f"{place} can't be enforced in the format of this model's calls: leave it out"
    return GrammarError(message, place, "unsupported_parameters")
