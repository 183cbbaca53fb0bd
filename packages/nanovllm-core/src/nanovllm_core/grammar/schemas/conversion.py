"""Converts a JSON Schema to one that xgrammar enforces completely."""

from nanovllm_core.grammar.schemas.document import Document
from nanovllm_core.grammar.schemas.emit import emit
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.keywords import read
from nanovllm_core.grammar.schemas.library import Library


def convert_schema(schema: JSON, place: str) -> JSON:
    """Convert `schema` so that xgrammar enforces all of it.

    Every value that the result permits is valid against `schema` (draft 2020-12; older drafts are also understood), and
    at least one such value exists.

    place: name of the schema's root in error messages.
    Raises SchemaError with keyword and place if the schema can't be converted.
    """
    document = Document(schema, place)
    library = Library(document, read)
    return emit(library, library.number(document.root))
