"""Converts JSON schemas to schemas that xgrammar enforces completely, or rejects them with keyword and place."""
