"""JSON schemas: converts them to schemas that xgrammar enforces whole, or refuses them by keyword and place."""
