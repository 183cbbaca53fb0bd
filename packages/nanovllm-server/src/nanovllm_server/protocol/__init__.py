"""The HTTP contract as types: what a request may say, what an answer looks like, how a refusal is worded.

This room must not know HTTP servers, engines or tokenizers: JSON goes in and out, nothing is awaited.
"""
