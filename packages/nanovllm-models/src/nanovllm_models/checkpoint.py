"""Weights from safetensors files, streamed tensor by tensor; or random ones in their stead.

This room must not know any architecture: names and shapes are checked by nanovllm_core's strict loader.
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
    """The files that hold a model's weights. progress: show a bar on stderr; None for when that is a terminal."""

    files: tuple[Path, ...]
    progress: bool | None = None

    def fill(self, module: nn.Module, ignore: Callable[[str], bool]) -> None:
        """Load every weight of `module`; `ignore` says which other tensors may be there.

        Raises WeightError when the tensors are not the model's, ModelError when a file can't be read.
        """
        load_weights(module, self.tensors(), ignore)

    def names(self) -> frozenset[str]:
        """The names of all tensors. Raises ModelError when a file can't be read."""
        found: set[str] = set()
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as opened:
                    found.update(opened.keys())
            except (OSError, SafetensorError) as error:
                raise ModelError(f"can't read {file}: {error}") from error
        return frozenset(found)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, on the CPU, as stored: views of a file that is mapped while it is read, file after file.

        Raises ModelError when a file can't be read.
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
    """Weights that are drawn rather than loaded, to try out or time a model without its checkpoint."""

    seed: int

    def fill(self, module: nn.Module, ignore: Callable[[str], bool]) -> None:
        """Draw every weight of `module`."""
        del ignore
        fill_random(module, self.seed)

    def names(self) -> frozenset[str]:
        """None: what a checkpoint may have or not, a model without one has not."""
        return frozenset()


WeightSource = Checkpoint | RandomWeights


def find_checkpoint(path: Path, progress: bool | None = None) -> Checkpoint:
    """The safetensors files of a model directory: those that its index names, else the only one.

    Raises ModelError when there are none or one that the index names is missing.
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
