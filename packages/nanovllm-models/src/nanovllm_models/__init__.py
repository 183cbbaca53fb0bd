"""Model families for nanovllm: a checkpoint directory in, a ModelSpec out."""

from nanovllm_models.default_model import default_model_path
from nanovllm_models.errors import ModelError, TemplateError
from nanovllm_models.registry import load
from nanovllm_models.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ModelError", "TemplateError", "Tokenizer", "default_model_path", "load", "load_tokenizer"]
