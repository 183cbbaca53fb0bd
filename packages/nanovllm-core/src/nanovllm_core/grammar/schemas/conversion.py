"""Converts a JSON schema to a schema that xgrammar enforces completely."""

from nanovllm_core.grammar.schemas.document import Document
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.keywords import read_shapes
from nanovllm_core.grammar.schemas.schema_writer import write_schema
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver


def convert_schema(schema: JSON, place: str) -> dict[str, JSON]:
    """Converts `schema`, of draft 2020-12 or older, to a schema that xgrammar enforces.

    A grammar of the converted schema permits at least one value. Each permitted value is valid against `schema`.
    Raises SchemaError if the conversion is not possible.
    place: JSON pointer to `schema` in the client's request, for errors.
    """
    document = Document(schema, place)
    resolver = ShapeResolver(document, read_shapes)
    return write_schema(resolver, resolver.conjunction_of(document.root))
