"""Parses the text of an answer into events: reasoning, content and tool calls. Takes the text piece by piece."""
