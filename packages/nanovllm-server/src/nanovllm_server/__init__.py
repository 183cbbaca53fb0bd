"""An OpenAI-compatible chat completions server for the nanovllm engine: converts between text and token ids."""

from importlib.metadata import version

__version__ = version("nanovllm-server")
