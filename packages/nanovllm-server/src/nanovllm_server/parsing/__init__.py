"""The text of an answer taken apart: reasoning, content and tool calls, as the text comes.

This room must not know tokens, engines or HTTP: pieces of text go in, events come out.
"""
