"""Weights from safetensors files, read tensor by tensor, or random weights in their place.

nanovllm_core's loader checks names and shapes.
"""

from collections.abc import Callable, Iterator
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
    """Weights in safetensors files.

    files: the files, in the order in which they are read.
    progress: whether to show a progress bar on stderr; None: show it if stderr is a terminal.
    """

    files: tuple[Path, ...]
    progress: bool | None = None

    def load_into(self, module: nn.Module, ignore: Callable[[str], bool]) -> None:
        """Load every weight of `module`.

        ignore: returns whether the files may have a tensor of this name although the module does not use it.
        Raises WeightError if the tensors do not fit the model, ModelError if a file can't be read.
        """
        load_weights(module, self.tensors(), ignore)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors. Raises ModelError if a file can't be read."""
        names: set[str] = set()
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as opened:
                    names.update(opened.keys())
            except (OSError, SafetensorError) as error:
                raise ModelError(f"can't read {file}: {error}") from error
        return frozenset(names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and the tensor, on the CPU and as stored.

        Tensors are views of the memory-mapped file.
        Raises ModelError if a file can't be read.
        """
        bar = tqdm(
            desc="Loading weights", unit=" tensors", disable=None if self.progress is None else not self.progress
        )
        with bar:
            for file in self.files:
                try:
                    with safe_open(file, framework="pt") as opened:
                        names = opened.keys()
                        bar.total = (bar.total or 0) + len(names)
                        for name in names:
                            yield name, opened.get_tensor(name)
                            bar.update()
                except (OSError, SafetensorError) as error:
                    raise ModelError(f"can't read {file}: {error}") from error


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random weights, to try out or time a model without its checkpoint."""

    seed: int

    def load_into(self, module: nn.Module, ignore: Callable[[str], bool]) -> None:
        """Fill every weight of `module` with random numbers; `ignore` is not used."""
        del ignore
        fill_random(module, self.seed)

    def names(self) -> frozenset[str]:
        """Return no names: random weights leave out the tensors that a checkpoint may or may not have."""
        return frozenset()


WeightSource = CheckpointWeights | RandomWeights


def find_checkpoint(path: Path, progress: bool | None = None) -> CheckpointWeights:
    """Find the safetensors files of a model directory: the files that the index names, or else the single file.

    progress: see `CheckpointWeights`.
    Raises ModelError if there is no file, or if a file that the index names is missing.
    """
    if (path / INDEX_NAME).exists():
        shard_names = sorted(set(read_fields(path / INDEX_NAME).string_mapping("weight_map").values()))
        missing = [shard for shard in shard_names if not (path / shard).is_file()]
        if missing:
            count = f"{len(missing)} of {len(shard_names)} files are missing"
            raise ModelError(f"{path / INDEX_NAME} names {missing[0]}, which is not there ({count})")
        return CheckpointWeights(tuple(path / shard for shard in shard_names), progress)
    if (path / SINGLE_FILE_NAME).is_file():
        return CheckpointWeights((path / SINGLE_FILE_NAME,), progress)
    raise ModelError(
        f"{path} has no {SINGLE_FILE_NAME} and no {INDEX_NAME}: only safetensors checkpoints are supported"
    )
