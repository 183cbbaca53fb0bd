"""Converts JSON schemas to schemas that xgrammar enforces completely. Errors name the unsupported keyword."""
