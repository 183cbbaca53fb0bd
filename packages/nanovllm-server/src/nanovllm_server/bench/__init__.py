"""`nanovllm-bench`: benchmark commands. `flags` declares their flags, `cli` runs them.

serve, grammars, interference, trace and kernels are the modules of these names. throughput, latency and prefill are in
`offline`: they run our engine in this process, and a peer in its own.
"""
