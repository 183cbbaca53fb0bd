"""The host's bookkeeping of the KV cache, and the cache's memory."""
