"""Exports the type of JSON values, and `describe_value`, which shortens a value for error messages."""

from nanovllm_core.grammar.schemas.json_values import JSON, describe_value

__all__ = ["JSON", "describe_value"]
