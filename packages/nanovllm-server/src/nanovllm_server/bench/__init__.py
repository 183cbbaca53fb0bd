"""`nanovllm-bench`: benchmark commands. `flags` declares their flags, `bench_cli` runs them.

`offline` has the commands throughput, latency and prefill. Each other command has a module or a package of its name.
"""
