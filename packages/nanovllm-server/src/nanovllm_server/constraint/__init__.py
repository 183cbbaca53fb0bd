"""Builds the grammar of an answer from the request and the chat format. The grammar is a structural tag of xgrammar."""
