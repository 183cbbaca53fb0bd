"""The KV cache as the host sees it: block numbers, their holders, and what can be found again."""
