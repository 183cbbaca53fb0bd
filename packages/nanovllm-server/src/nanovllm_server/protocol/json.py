"""Exports the type of JSON values, and `show`, which shortens a value for error messages."""

from nanovllm_core.grammar.schemas.json_values import JSON, show

__all__ = ["JSON", "show"]
