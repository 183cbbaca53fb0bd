"""An OpenAI-compatible chat completions server over the nanovllm engine.

The only package that knows text and HTTP: messages come in, token ids go to the engine, tokens come back and leave as
server-sent events or as one JSON body.
"""

from importlib.metadata import version

__version__ = version("nanovllm-server")
