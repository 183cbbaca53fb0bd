"""The errors of this package. Each message is one line about a model directory or a conversation."""


class ModelError(ValueError):
    """A model directory that can't be served; the message names the file or field and says what is wrong with it."""


class TemplateError(ModelError):
    """A conversation that the model's chat template refuses, or a model without a template."""


class TemplateValueError(TemplateError):
    """A value for the chat template under a name that is reserved."""
