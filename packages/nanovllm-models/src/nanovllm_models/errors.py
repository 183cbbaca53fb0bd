"""The errors of this package. Each message is one line."""


class ModelError(ValueError):
    """A model directory that can't be served. The message names the file or field."""


class TemplateError(ModelError):
    """A conversation that the chat template refuses, or a model without a chat template."""


class TemplateValueError(TemplateError):
    """A template variable from the caller with a reserved name."""
