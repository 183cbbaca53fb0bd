"""Runs a chat completion, from the parsed request to the deltas of the answer."""
