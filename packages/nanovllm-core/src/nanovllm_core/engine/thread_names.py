"""The name of the engine's thread, in a module that does not import torch."""

import threading

ENGINE_THREAD_NAME = "nanovllm-engine"  # prefix of the name of the thread that runs the model


def is_engine_thread_alive() -> bool:
    """Whether this process has a thread that runs a model.

    A normal exit of the process waits for this thread. After a rank has failed, the thread may wait for a GPU forever.
    """
    return any(thread.name.startswith(ENGINE_THREAD_NAME) for thread in threading.enumerate())
