"""The errors of this package. Each message is one line."""


class ModelError(ValueError):
    """A model directory can't be served. The message names the file or field."""


class TemplateError(ModelError):
    """The chat template refuses a conversation, or the model has no chat template."""


class TemplateValueError(TemplateError):
    """A template variable of the caller has a reserved name."""
