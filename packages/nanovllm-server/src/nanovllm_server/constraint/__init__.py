"""What the engine is to hold an answer to: structural tags, as xgrammar reads them, made of requests and chat formats.

This room must not know tokens beyond the special ones that a format's tags are, nor how a grammar is compiled.
"""
