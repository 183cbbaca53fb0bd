"""Converts a JSON schema to one that xgrammar enforces completely."""

from nanovllm_core.grammar.schemas.document import Document
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.keywords import read_shapes
from nanovllm_core.grammar.schemas.schema_writer import write_schema
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver


def convert_schema(schema: JSON, place: str) -> dict[str, JSON]:
    """Converts `schema` (draft 2020-12; keywords of older drafts are understood) to one that xgrammar enforces.

    Every value that a grammar of the result permits is valid against `schema`, and there is at least one such value.
    place: the name of the schema's root in errors.

    Raises SchemaError, which names the keyword and its place, if the conversion is not possible.
    """
    document = Document(schema, place)
    resolver = ShapeResolver(document, read_shapes)
    return write_schema(resolver, resolver.schema_set_of(document.root))
