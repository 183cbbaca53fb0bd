"""Exports the type of JSON values, and the function that shortens them for error messages."""

from nanovllm_core.grammar.schemas.json_values import JSON, show

__all__ = ["JSON", "show"]
