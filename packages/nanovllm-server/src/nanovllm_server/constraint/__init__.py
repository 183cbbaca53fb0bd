"""Builds the grammar that constrains an answer, as an xgrammar structural tag, from the request and the chat format."""
