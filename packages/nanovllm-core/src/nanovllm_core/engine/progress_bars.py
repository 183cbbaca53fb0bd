"""Settings of progress bars in a process that the engine starts."""

import threading


def use_thread_lock() -> None:
    """Give the progress bars of this process a lock that ends with the process.

    By default they create a semaphore, which remains if the process is killed or ends by `os._exit`.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
