"""`ApiError`, the exception for error responses, and functions that make an `ApiError`."""

from collections.abc import Mapping

from nanovllm_server.protocol.bodies import Error
from nanovllm_server.protocol.json import JSON, describe_value


class ApiError(Exception):
    """An error response.

    param: path of the request's field that caused the error; None if the cause is not a field.
    code: constant that programs can compare; None if the status is specific enough.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> Error:
        """Returns the body of the response."""
        return {"error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}}


def bad_field(path: str, expected: str, value: JSON) -> ApiError:
    """Returns a 400 for the field at `path`. expected: text after "must be" in the message."""
    return ApiError(400, f"{path} must be {expected}, not {describe_value(value)}", param=path, code="invalid_value")


def missing_field(path: str, expected: str) -> ApiError:
    """Returns a 400 for the absent field at `path`. expected: text after "must be" in the message."""
    message = f"{path} is missing: it must be {expected}"
    return ApiError(400, message, param=path, code="missing_required_parameter")


def unsupported(path: str, message: str) -> ApiError:
    """Returns a 400 for a field that requests an unsupported feature."""
    return ApiError(400, message, param=path, code="unsupported_parameter")


def invalid_grammar(path: str, reason: str) -> ApiError:
    """Returns a 400 for a field whose constraint on the answer can't be enforced."""
    return ApiError(400, f"{path} can't be enforced: {reason}", param=path, code="invalid_grammar")


def prompt_too_long(max_model_len: int, num_tokens: str) -> ApiError:
    """Returns a 400 for messages that exceed the context. num_tokens: prompt length, for example "at least 5000"."""
    # Some clients search the message for OpenAI's wording, and then shorten the conversation.
    return ApiError(
        400,
        f"Input tokens exceed the configured limit: this model's maximum context length is {max_model_len} tokens, of "
        f"which at least one is for the answer, and the messages have {num_tokens}: shorten them",
        param="messages",
        code="context_length_exceeded",
    )


def prediction_too_long(max_model_len: int, num_tokens: str) -> ApiError:
    """Returns a 400 for a prediction that exceeds the context. num_tokens: its length, for example "at least 5000"."""
    return ApiError(
        400,
        f"prediction.content must have at most {max_model_len} tokens, the context's length, but has {num_tokens}: "
        "shorten it",
        param="prediction.content",
        code="context_length_exceeded",
    )


def unavailable(message: str, code: str) -> ApiError:
    """Returns a 503: the server accepts no requests now."""
    return ApiError(503, message, error_type="service_unavailable_error", code=code, headers={"Retry-After": "5"})


def timed_out(seconds: float) -> ApiError:
    """Returns a 504: the answer took longer than `seconds`."""
    message = f"the answer took longer than its limit of {seconds:g} s: raise the limit, or ask for fewer tokens"
    # OpenAI's SDKs repeat a request after a 5xx, unless this header forbids it. A repeated request would take as long.
    headers = {"X-Should-Retry": "false"}
    return ApiError(504, message, error_type="timeout_error", code="deadline_exceeded", headers=headers)


def internal_error(request_id: str) -> ApiError:
    """Returns a 500 without details. The log has the details, with `request_id`."""
    message = f"internal server error: search the log for {request_id}"
    return ApiError(500, message, error_type="server_error", code="internal")
