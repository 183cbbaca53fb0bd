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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files that hold a model's weights.

    files: safetensors files, in the order in which they are read.
    progress: whether to show a bar on stderr; None to show it if stderr is a terminal.
    """

    files: tuple[Path, ...]
    progress: bool | None = None

    def fill(self, module: nn.Module, ignore: Callable[[str], bool]) -> None:
        """Load every weight of `module`.

        ignore: says whether a tensor that the module does not have may be in the files, by its name.
        Raises WeightError if the tensors do not fit the model, ModelError if a file can't be read.
        """
        load_weights(module, self.tensors(), ignore)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors. Raises ModelError if a file can't be read."""
        found: set[str] = set()
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as opened:
                    found.update(opened.keys())
            except (OSError, SafetensorError) as error:
                raise ModelError(f"can't read {file}: {error}") from error
        return frozenset(found)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and the tensor, on the CPU and as stored.

        Tensors are views of a file that is mapped while it is read.
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

    def fill(self, module: nn.Module, ignore: Callable[[str], bool]) -> None:
        """Draw every weight of `module`; `ignore` is not used."""
        del ignore
        fill_random(module, self.seed)

    def names(self) -> frozenset[str]:
        """Return no names: a model without a checkpoint has none of the tensors that are optional in one."""
        return frozenset()


WeightSource = Checkpoint | RandomWeights


def find_checkpoint(path: Path, progress: bool | None = None) -> Checkpoint:
    """Find the safetensors files of a model directory: the files that its index names, or else its single file.

    progress: see `Checkpoint`.
    Raises ModelError if there is no file, or if a file that the index names is missing.
    """
    if (path / INDEX).exists():
        shards = sorted(set(read_fields(path / INDEX).mapping("weight_map").values()))
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise ModelError(
                f"{path / INDEX} names {missing[0]}, which is not there (missing: {len(missing)} of {len(shards)})"
            )
        return Checkpoint(tuple(path / shard for shard in shards), progress)
    if (path / SINGLE).is_file():
        return Checkpoint((path / SINGLE,), progress)
    raise ModelError(f"{path} has no {SINGLE} and no {INDEX}: only safetensors checkpoints are supported")
