"""`nanovllm-bench`: benchmark commands. `flags` declares their flags, `bench_cli` runs them.

`offline` has the commands throughput, latency and prefill. Every other command has a module or package of its name.
`server_cases` has the code that interference and conversations share.
"""
