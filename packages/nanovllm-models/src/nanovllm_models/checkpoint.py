"""Provides a model's weights: from safetensors files, or random numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm_core.layers.weights import fill_random, load_weights
from nanovllm_models.errors import ModelError
from nanovllm_models.fields import read_fields

INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """Weights in safetensors files. show_progress: whether to show a progress bar; None: if stderr is a terminal."""

    files: tuple[Path, ...]
    show_progress: bool | None = None

    def load_into(self, module: nn.Module, can_skip: Callable[[str], bool]) -> None:
        """Load every weight of `module`. Raises WeightError if tensors do not fit, ModelError if a file can't be read.

        can_skip: takes the name of a tensor that the module lacks; returns whether to ignore the tensor.
        """
        load_weights(module, self.tensors(), can_skip)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors. Raises ModelError if a file can't be read."""
        names: set[str] = set()
        for file in self.files:
            with _open(file) as opened:
                names.update(opened.keys())
        return frozenset(names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and the tensor, a view of the mapped file. Raises ModelError."""
        bar = tqdm(
            desc="Loading weights",
            unit=" tensors",
            disable=None if self.show_progress is None else not self.show_progress,
        )
        with bar:
            for file in self.files:
                with _open(file) as opened:
                    names = opened.keys()
                    bar.total = (bar.total or 0) + len(names)
                    for name in names:
                        yield name, opened.get_tensor(name)
                        bar.update()


@contextmanager
def _open(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ModelError(f"can't read {file}: {error}") from error


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random weights, for timing a model without its checkpoint."""

    seed: int

    def load_into(self, module: nn.Module, can_skip: Callable[[str], bool]) -> None:
        """Fill every weight of `module` with random numbers."""
        del can_skip
        fill_random(module, self.seed)

    def names(self) -> frozenset[str]:
        """Return no names: there is no checkpoint."""
        return frozenset()


WeightSource = CheckpointWeights | RandomWeights


def find_checkpoint(path: Path, show_progress: bool | None = None) -> CheckpointWeights:
    """Find the safetensors files of a model directory. Raises ModelError if there is no file or a shard is missing."""
    if (path / INDEX_NAME).exists():
        shard_names = sorted(set(read_fields(path / INDEX_NAME).string_mapping("weight_map").values()))
        missing = [shard for shard in shard_names if not (path / shard).is_file()]
        if missing:
            summary = f"{len(missing)} of {len(shard_names)} files are missing"
            raise ModelError(f"{path / INDEX_NAME} names {missing[0]}, which does not exist ({summary})")
        return CheckpointWeights(tuple(path / shard for shard in shard_names), show_progress)
    if (path / SINGLE_FILE_NAME).is_file():
        return CheckpointWeights((path / SINGLE_FILE_NAME,), show_progress)
    raise ModelError(
        f"{path} has no {SINGLE_FILE_NAME} and no {INDEX_NAME}: only safetensors checkpoints are supported"
    )
