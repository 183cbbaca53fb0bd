"""The exceptions that callers of the engine handle."""


class RequestError(ValueError):
    """A request that can't be served. field: name of the invalid field. The message states the valid values."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class GrammarError(ValueError):
    """A grammar that can't be used. The message is one line with the reason and the remedy."""


class ConfigError(ValueError):
    """An invalid setting. The message names the setting, its value and the valid values."""


class EngineDeadError(RuntimeError):
    """The engine has stopped for good. The message states the reason."""
