"""Converts an answer's tokens to text, and splits the text into reasoning, content and tool calls."""
