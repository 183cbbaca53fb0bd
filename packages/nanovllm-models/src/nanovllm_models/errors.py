"""The errors of this package: one line each, about what the user gave us. This room knows nothing else."""


class ModelError(ValueError):
    """A model directory that can't be served; the message says what is wrong with which file or field."""


class TemplateError(ModelError):
    """A conversation that the model's chat template refuses, or a model without a template."""


class TemplateValueError(TemplateError):
    """A value for the chat template under a name that is not the caller's to give."""
