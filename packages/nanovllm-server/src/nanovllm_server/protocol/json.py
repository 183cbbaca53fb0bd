"""JSON values as a type, and how error messages show them."""

from nanovllm_core.grammar.schemas.json_values import JSON, show

__all__ = ["JSON", "show"]
