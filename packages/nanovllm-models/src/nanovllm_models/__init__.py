"""Model families for nanovllm. `load` turns a checkpoint directory into a ModelSpec."""

from typing import TYPE_CHECKING

from nanovllm_models.chat_formats import ChatFormat, read_chat_format
from nanovllm_models.default_model import default_model_path
from nanovllm_models.errors import ModelError, TemplateError, TemplateValueError
from nanovllm_models.hub import ModelDirectory, find_model
from nanovllm_models.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from nanovllm_models.registry import load

__all__ = [
    "ChatFormat",
    "ModelDirectory",
    "ModelError",
    "TemplateError",
    "TemplateValueError",
    "Tokenizer",
    "default_model_path",
    "find_model",
    "load",
    "load_tokenizer",
    "read_chat_format",
]


def __getattr__(name: str) -> object:
    # The registry imports torch, which takes seconds and half a gigabyte of memory.
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nanovllm_models.registry import load

    return load
