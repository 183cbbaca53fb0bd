"""`nanovllm-bench`: benchmark commands. `flags` declares their flags, `bench_cli` runs them.

`offline` has the commands throughput, latency and prefill. `server_cases` has code that several commands share.
"""
