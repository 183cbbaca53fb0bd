"""The commands `throughput`, `latency` and `prefill`: our engine in this process, other engines (peers) in others."""
