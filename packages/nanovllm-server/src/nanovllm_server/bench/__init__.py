"""`nanovllm-bench`: programs that measure, against a peer where there is one, in the same run on the same machine."""
