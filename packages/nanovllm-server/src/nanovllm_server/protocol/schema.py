"""Checks the size of JSON schemas in requests, and makes the error for a schema that the engine refuses."""

from nanovllm_core.errors import GrammarError, GrammarErrorCode
from nanovllm_core.grammar.schemas.document import check_schema_size
from nanovllm_server.protocol.error import ApiError, invalid_grammar
from nanovllm_server.protocol.json import JSON

RESPONSE_CODES: dict[GrammarErrorCode, str] = {
    "invalid_schema": "invalid_value",
    "unsupported_schema": "unsupported_schema",
    "unsupported_parameters": "unsupported_parameter",
}


def require_small_schema(schema: JSON, path: str) -> None:
    """Raises ApiError (400) if the schema of the field at `path` is too large or nested too deeply."""
    try:
        check_schema_size(schema, path)
    except GrammarError as error:
        raise refused_grammar(path, error) from error


def refused_grammar(path: str, error: GrammarError) -> ApiError:
    """Returns a 400 that names the keyword at fault in a schema, or the field at `path` if no keyword is at fault."""
    if error.place is None:
        return invalid_grammar(path, error.message)
    return ApiError(400, error.message, param=error.place, code=RESPONSE_CODES[error.code])
