"""How a refusal is worded: one exception for every answer that is not a success, and its JSON body.

This room must not know who raises or who sends it.
"""

from collections.abc import Mapping

from nanovllm_server.protocol.bodies import Error
from nanovllm_server.protocol.json import JSON, show


class ApiError(Exception):
    """An answer other than success. `param` names the field that is wrong, `code` is for programs to compare."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> Error:
        """The error object of OpenAI's own schema."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_field(path: str, right: str, value: JSON) -> ApiError:
    """A 400 for the field at `path`, which has `value` where `right` is wanted."""
    return ApiError(400, f"{path} must be {right}, not {show(value)}", param=path, code="invalid_value")


def unsupported(path: str, message: str) -> ApiError:
    """A 400 for the field at `path`, which asks for something that this release can't do."""
    return ApiError(400, message, param=path, code="unsupported_parameter")


def invalid_grammar(path: str, reason: str) -> ApiError:
    """A 400 for what the field at `path` has an answer held to, which can't be."""
    return ApiError(400, f"{path} can't be enforced: {reason}", param=path, code="invalid_grammar")


def unavailable(message: str, code: str) -> ApiError:
    """A 503: not now, whatever the request says."""
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers={"Retry-After": "5"})


def timed_out(seconds: float) -> ApiError:
    """A 504: the answer took longer than the request, or the server, allows."""
    message = f"the answer took longer than the {seconds:g} s that it may: allow more, or ask for fewer tokens"
    return ApiError(504, message, kind="timeout_error", code="deadline_exceeded")


def internal_error(request_id: str) -> ApiError:
    """A 500 that tells no more than the id under which the log has the rest."""
    return ApiError(500, f"internal server error; the log has it as {request_id}", kind="server_error", code="internal")
