"""The check of JSON schemas in requests: a schema that can't be enforced is refused with a 400."""

from nanovllm_core.grammar.schemas.conversion import convert_schema
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON


def check_schema(schema: JSON, path: str) -> JSON:
    """The schema of the field at `path`, converted by `convert_schema` for xgrammar.

    Raises ApiError, a 400 that names the keyword and its place, if the schema can't be enforced.
    """
    try:
        return convert_schema(schema, path)
    except SchemaError as error:
        code = "invalid_value" if error.wrong else "unsupported_schema"
        raise ApiError(400, str(error), param=error.place, code=code) from error
