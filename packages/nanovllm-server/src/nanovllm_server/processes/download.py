"""Finds the model's directory. Downloads run in a process of their own, which the server can kill at any time."""

import asyncio
import multiprocessing
import signal
from multiprocessing.connection import Connection

from nanovllm_core.engine.parent_watch import exit_with_parent
from nanovllm_models import ModelDirectory, ModelError, find_model
from nanovllm_models.hub import is_repository
from nanovllm_server.observability.logs import configure_logs
from nanovllm_server.settings import Settings


async def find_or_download(settings: Settings) -> ModelDirectory:
    """Returns the model's directory. Raises ModelError, or RuntimeError if the downloading process dies.

    Cancellation ends a download.
    """
    if settings.model is None or not is_repository(settings.model):
        return await asyncio.to_thread(find_model, settings.model)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_download, args=(settings, sender), name="nanovllm-download", daemon=True)
    with sender:
        process.start()
    try:
        result: ModelDirectory | str = await asyncio.to_thread(receiver.recv)
    except EOFError:
        process.join()
        raise RuntimeError(f"the download of {settings.model} ended with exit code {process.exitcode}") from None
    finally:
        # If this task is cancelled, the death of the process ends the thread that waits in `recv`.
        process.kill()
    if isinstance(result, str):
        raise ModelError(result)
    return result


def _download(settings: Settings, sender: Connection) -> None:
    """Finds the model. Sends the directory, or the message of a ModelError, to the parent."""
    # Terminals send these signals to all processes, but only the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_with_parent()
    configure_logs(settings.log_format, settings.log_level)
    try:
        sender.send(find_model(settings.model, with_weights=settings.load_format != "dummy"))
    except ModelError as error:
        sender.send(str(error))
