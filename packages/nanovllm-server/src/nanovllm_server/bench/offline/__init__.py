"""The commands `throughput`, `latency` and `prefill`. Peers (other engines) run in processes of their own."""
