"""The commands `throughput`, `latency` and `prefill`: our engine runs in this process, a peer in another."""
