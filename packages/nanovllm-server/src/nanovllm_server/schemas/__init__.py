"""JSON schemas: which of them a grammar can enforce, and the one that is handed to whom makes it."""
