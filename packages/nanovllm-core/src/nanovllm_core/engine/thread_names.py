"""Names of threads, in a module without imports, because the engine's process needs them before it imports torch."""

ENGINE_THREAD_NAME = "nanovllm-engine"  # prefix of the name of the thread that runs the model
