"""From a JSON Schema as its author wrote it to an equivalent one that xgrammar enforces whole."""

from nanovllm_core.grammar.schemas.document import Document
from nanovllm_core.grammar.schemas.emit import emit
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.keywords import read
from nanovllm_core.grammar.schemas.library import Library


def convert_schema(schema: JSON, place: str) -> JSON:
    """The schema, written so that xgrammar enforces all of it. place: what errors call the root of the schema.

    Every value that a grammar of the result permits is valid against `schema` (draft 2020-12; spellings of older drafts
    are understood where they differ), and there is at least one such value.

    Raises SchemaError, which names the keyword and its place, where that is not possible.
    """
    document = Document(schema, place)
    library = Library(document, read)
    return emit(library, library.number(document.root))
