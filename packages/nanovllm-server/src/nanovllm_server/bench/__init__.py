"""`nanovllm-bench`: benchmark commands. `flags` declares their flags, `cli` runs them.

`offline` has the commands throughput, latency and prefill. Each other command has a module of its name.
"""
