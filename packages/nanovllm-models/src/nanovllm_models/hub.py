"""Finds a model's directory: the default model, a local directory, or a repository of the Hugging Face Hub."""

import logging
import os.path
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanovllm_models.default_model import MODEL_NAME, default_model_path
from nanovllm_models.errors import ModelError

# `organisation/name`, optionally `@revision`: a branch, a tag or a commit.
REPOSITORY_PATTERN = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
# Globs of the files to download: configuration and tokenizer, and weights.
METADATA_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
WEIGHT_FILES = ("*.safetensors",)
# Globs of files that are not downloaded: copies of the weights in other layouts.
IGNORED_FILES = ("*/*", "consolidated*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory with a model. name: the repository's name, or the directory's name."""

    path: Path
    name: str


def is_repository(model: str) -> bool:
    """Return whether `model` selects a repository: it has the form of REPOSITORY_PATTERN, and no path has this name."""
    return REPOSITORY_PATTERN.fullmatch(model) is not None and not os.path.lexists(_expand_home(model))


def is_default_name(model: str | None) -> bool:
    """Return whether `model` selects the default model: it is None, or MODEL_NAME if no path has this name."""
    return model is None or (model == MODEL_NAME and not os.path.lexists(model))


def find_model(model: str | None, *, with_weights: bool = True, show_progress: bool | None = None) -> ModelDirectory:
    """Find a model's directory. For a repository, downloads the files that the cache of huggingface_hub lacks.

    huggingface_hub reads its environment variables, such as HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
    Raises ModelError if neither a directory nor a repository is found, if a local directory has no config.json, or if
    a download fails.

    model: a directory, or `organisation/name` or `organisation/name@revision` of a repository; None or MODEL_NAME for
        the default model.
    with_weights: whether to download weights.
    show_progress: whether to show progress bars on stderr; None: show them if stderr is a terminal. Without progress
        bars, a log line reports a download.
    """
    if model is None or is_default_name(model):
        path = default_model_path(show_progress)
        return ModelDirectory(path, path.name)
    path = Path(_expand_home(model))
    if os.path.isdir(_expand_home(model)):  # noqa: PTH112 - `Path.is_dir` raises OSError for a long name.
        # Check now: the engine and the tokenizer load concurrently, and would report a missing file in different words.
        check_has_config(path)
        return ModelDirectory(path, path.resolve().name)
    match = REPOSITORY_PATTERN.fullmatch(model)
    if match is None or not is_repository(model):
        is_path = os.sep in model or os.path.lexists(_expand_home(model))
        problem = "not a directory" if is_path else "neither a directory nor the name of a repository"
        raise ModelError(
            f"{model!r} is {problem}: pass a directory with config.json and safetensors files, or a repository of the "
            "Hugging Face Hub, such as Qwen/Qwen3-0.6B"
        )
    files = (*METADATA_FILES, *WEIGHT_FILES) if with_weights else METADATA_FILES
    is_shown = sys.stderr.isatty() if show_progress is None else show_progress
    with _hide_progress_bars(not is_shown):
        return ModelDirectory(_download(match["name"], match["revision"], files, log_start=not is_shown), match["name"])


def check_has_config(directory: Path) -> None:
    """Raise ModelError unless `directory` has a config.json."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json: it is not a Hugging Face model directory")


def _expand_home(model: str) -> str:
    return os.path.expanduser(model)  # noqa: PTH111 - `Path.expanduser` raises RuntimeError for an unknown user.


def _download(name: str, revision: str | None, files: tuple[str, ...], *, log_start: bool) -> Path:
    # Imported here, because the import takes 0.3 s, and a model in a local directory does not need huggingface_hub.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - huggingface_hub imports it from httpx or httpx2
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    cache = constants.HF_HUB_CACHE
    if log_start and not constants.HF_HUB_OFFLINE:
        logger.info("downloading from %s the files of %s that are not yet in %s", hub, name, cache)
    try:
        path = snapshot_download(
            name, revision=revision, allow_patterns=list(files), ignore_patterns=list(IGNORED_FILES)
        )
    except GatedRepoError as error:
        raise ModelError(
            f"access to {name} on {hub} is restricted: accept the licence there, and set HF_TOKEN to a token of the "
            "account that accepted the licence"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is neither a directory nor a repository of {hub}: check the name; if the repository is private, "
            "set HF_TOKEN to a token that may read the repository"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{name} on {hub} has no revision {revision}: name a branch, a tag or a commit after @"
        ) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(
                f"{name} is not in the cache {cache}, and HF_HUB_OFFLINE forbids downloads: unset HF_HUB_OFFLINE, or "
                "pass a directory"
            ) from error
        if isinstance(error.__cause__, HfHubHTTPError):
            raise ModelError(f"{hub} refused to send {name}: {_to_one_line(error.__cause__)}") from error
        raise ModelError(
            f"{name} is not a directory, and {hub} can't be reached to download a repository of this name: check the "
            "network and HF_ENDPOINT, or pass a directory"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{name} is not a valid name of a repository: {_to_one_line(error)}") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{hub} refused to send {name}: {_to_one_line(error)}") from error
    except HTTPError as error:
        raise ModelError(
            f"the download of {name} from {hub} failed: {_to_one_line(error)} (start again to continue it)"
        ) from error
    except OSError as error:
        raise ModelError(
            f"can't store {name} in {cache}: {_to_one_line(error)} (set HF_HOME to use another directory)"
        ) from error
    return Path(path)


def _to_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _hide_progress_bars(is_hidden: bool) -> Generator[None]:
    """Hide the progress bars of huggingface_hub if `is_hidden`."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if not is_hidden or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
