"""The commands `throughput`, `latency` and `prefill`: our engine in this process, a peer in its own."""
