"""Exceptions that callers of the engine handle."""

from typing import Literal


class RequestError(ValueError):
    """A request has an invalid field. The message states the valid values. field: name of the invalid field."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


# invalid_grammar: the grammar can't be compiled. invalid_schema: a JSON schema in the grammar is invalid.
# unsupported_schema: a valid JSON schema can't be enforced. unsupported_parameters: the model writes function calls as
# XML, which can't express values that the schema of the parameters allows.
GrammarErrorCode = Literal["invalid_grammar", "invalid_schema", "unsupported_schema", "unsupported_parameters"]


class GrammarError(ValueError):
    """A grammar can't be used. The message is one line that says why and what to change.

    `GrammarError(*error.args)` copies an error.
    place: JSON pointer of the faulty keyword of a JSON schema; None if no JSON schema is at fault.
    """

    def __init__(self, message: str, place: str | None = None, code: GrammarErrorCode = "invalid_grammar"):
        super().__init__(message, place, code)
        self.message = message
        self.place = place
        self.code: GrammarErrorCode = code

    def __str__(self) -> str:
        return self.message


class ConfigError(ValueError):
    """A setting is invalid. The message names the setting, its value and the valid values."""


class EngineDeadError(RuntimeError):
    """The engine has stopped for good. The message states the reason."""
