"""`nanovllm-bench interference`: how long prompts, short requests, decoding streams and chat turns delay each other.

The client measures any OpenAI-compatible server over HTTP; `program` runs the cases that `situations` holds.
"""
