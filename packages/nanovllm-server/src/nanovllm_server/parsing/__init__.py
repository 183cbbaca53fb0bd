"""Reads the tokens of an answer: tokens to text, then text to reasoning, content and tool calls."""
