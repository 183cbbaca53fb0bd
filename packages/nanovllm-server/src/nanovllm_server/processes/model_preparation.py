"""Finds the model's directory. A separate process downloads models and converts the default model.

The server can kill this process at any time. The conversion imports torch, which would make the parent large.
"""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection

from nanovllm_core.engine.parent_watch import exit_with_parent
from nanovllm_core.stop_signals import ignore_stop_signals
from nanovllm_models import ModelDirectory, ModelError, find_model
from nanovllm_models.default_model import find_converted_model
from nanovllm_models.hub import is_default_name, is_repository
from nanovllm_server.observability.logs import configure_logs
from nanovllm_server.settings import Settings


async def prepare_model(model: str | None, settings: Settings) -> ModelDirectory:
    """Returns a model's directory, after a download or a conversion if the caches lack the model.

    Raises ModelError, or RuntimeError if the process that downloads or converts dies. model: see `find_model`.
    """
    if is_default_name(model):
        path = await asyncio.to_thread(find_converted_model)
        return await _prepare_in_child(model, settings) if path is None else ModelDirectory(path, path.name)
    if model is not None and is_repository(model):
        return await _prepare_in_child(model, settings)
    return await asyncio.to_thread(find_model, model)


async def _prepare_in_child(model: str | None, settings: Settings) -> ModelDirectory:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_child, args=(model, settings, sender), name="nanovllm-model", daemon=True)
    with sender:
        process.start()
    try:
        result: ModelDirectory | str = await asyncio.to_thread(receiver.recv)
    except EOFError:
        process.join()
        task = "the conversion of the default model" if is_default_name(model) else f"the download of {model}"
        raise RuntimeError(f"{task} ended with exit code {process.exitcode}") from None
    finally:
        # If this task is cancelled, the death of the process ends the thread that waits in `recv`.
        process.kill()
    if isinstance(result, str):
        raise ModelError(result)
    return result


def _run_child(model: str | None, settings: Settings, sender: Connection) -> None:
    """Downloads or converts the model. Sends the directory, or the message of a ModelError, to the parent."""
    ignore_stop_signals()
    exit_with_parent()
    configure_logs(settings.log_format, settings.log_level)
    try:
        sender.send(find_model(model, with_weights=settings.load_format != "dummy"))
    except ModelError as error:
        sender.send(str(error))
