"""Converts JSON schemas to schemas that xgrammar enforces completely, or refuses them by keyword and place."""
