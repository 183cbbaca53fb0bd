"""`nanovllm-bench`: benchmark programs. Some also run a peer engine on the same machine in the same call."""
