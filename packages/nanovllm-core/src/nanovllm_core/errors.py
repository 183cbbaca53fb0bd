"""The exceptions that callers of the engine handle."""


class RequestError(ValueError):
    """A request that can't be served. field: the name of the invalid field. The message says which values are valid."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class GrammarError(ValueError):
    """A grammar that can't be used. The message is one line that says why and what to change."""


class ConfigError(ValueError):
    """An invalid setting. The message names the setting, its value and the valid values."""


class EngineDeadError(RuntimeError):
    """The engine has stopped for good; the message says why."""
