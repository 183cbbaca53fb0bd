"""The check of JSON schemas that constrain an output: what can't be enforced is refused, and named.

This room must not know where in a request schemas stand, nor what they are good for.
"""

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON
from nanovllm_server.schemas.document import Document, SchemaError
from nanovllm_server.schemas.emit import emit
from nanovllm_server.schemas.keywords import read
from nanovllm_server.schemas.library import Library


def check_schema(schema: JSON, path: str) -> JSON:
    """The schema, written so that xgrammar enforces all of it, of the field at `path`.

    Whatever a grammar of the result permits meets `schema` (draft 2020-12; older spellings are understood where they
    mean something else), and there is something that it permits. Raises ApiError, a 400 that names the keyword and its
    place, where that can't be had.
    """
    try:
        document = Document(schema, path)
        library = Library(document, read)
        return emit(library, library.number(document.root))
    except SchemaError as error:
        code = "invalid_value" if error.wrong else "unsupported_schema"
        raise ApiError(400, str(error), param=error.place, code=code) from error
