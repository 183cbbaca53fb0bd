"""Loads weights into a model by name, strictly. Each layer offers slots for the tensors of the checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm_core.model import BuildContext

NAMES_SHOWN = 3
INITIAL_STD = 0.02


class WeightError(ValueError):
    """A checkpoint that does not fit the model. The message is one line with the tensor and the expectation."""


class Slot(NamedTuple):
    """The target of one tensor of the checkpoint.

    shape: shape of the tensor, over all ranks.
    copy: copies this rank's share of the tensor into the layer.
    dtype: required dtype of the tensor; None for any floating-point dtype of 16 bits or more.
    """

    shape: tuple[int, ...]
    copy: Callable[[Tensor], object]
    dtype: torch.dtype | None = None

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the tensor may have this dtype."""
        return dtype == self.dtype if self.dtype is not None else dtype.is_floating_point and dtype.itemsize > 1


class WeightedModule(nn.Module, ABC):
    """A layer that owns weights.

    Weights are plain attributes, not parameters: they need no gradients, `finish` may replace them, and reading a plain
    attribute is faster.
    """

    def __init__(self, build: BuildContext):
        super().__init__()
        self.device = build.device
        self.dtype = build.dtype

    def allocate(self, *shape: int) -> Tensor:
        """An uninitialised tensor of this layer's dtype on its device."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @abstractmethod
    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Pairs (name in the checkpoint, slot). name: dotted path of this module within the model."""

    @abstractmethod
    def randomize(self, generator: torch.Generator) -> None:
        """Fill the weights with random numbers that keep activations in range."""

    def finish(self) -> None:
        """Bring the weights into the form that runs fastest. Called once all weights are loaded."""
        return


def load_weights(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], ignore: Callable[[str], bool] = lambda _: False
) -> None:
    """Fill every slot of `module` and its submodules exactly once from `tensors`, then finish them.

    tensors: pairs (name, whole tensor) in any order, on any device. Only one tensor is held at a time.
    ignore: returns whether a tensor without a slot may be skipped, by its name.
    Raises WeightError for a tensor that is missing, unexpected, repeated, or of another shape or kind of dtype.
    """
    layers = _weighted(module)
    slots = dict(slot for name, layer in layers for slot in layer.slots(name))
    filled: set[str] = set()
    for name, tensor in tensors:
        slot = slots.get(name)
        shape = tuple(tensor.shape)
        if slot is None:
            if ignore(name):
                continue
            raise WeightError(f"tensor {name} {list(shape)} is in the checkpoint, but the model has no such weight")
        if name in filled:
            raise WeightError(f"tensor {name} is in the checkpoint twice")
        if shape != slot.shape:
            raise WeightError(f"tensor {name} has shape {list(shape)}, but the model expects {list(slot.shape)}")
        if not slot.takes(tensor.dtype):
            expected = "floating-point numbers of 16 or 32 bits" if slot.dtype is None else _name(slot.dtype)
            raise WeightError(f"tensor {name} is of {_name(tensor.dtype)}, but the model expects {expected}")
        slot.copy(tensor)
        filled.add(name)
        # Free this tensor's memory, or its mapped file, before the next one is read.
        del tensor
    missing = [name for name in slots if name not in filled]
    if missing:
        shown = ", ".join(f"{name} {list(slots[name].shape)}" for name in missing[:NAMES_SHOWN])
        more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
        raise WeightError(f"the checkpoint lacks {len(missing)} of {len(slots)} tensors: {shown}{more}")
    for _, layer in layers:
        layer.finish()


def fill_random(module: nn.Module, seed: int) -> None:
    """Fill every layer of `module` with random weights, which depend on seed and kind of device, and finish it."""
    layers = _weighted(module)
    generator = torch.Generator(layers[0][1].device).manual_seed(seed)
    for _, layer in layers:
        layer.randomize(generator)
    for _, layer in layers:
        layer.finish()


def fill_normal(weight: Tensor, generator: torch.Generator) -> None:
    """Draw `weight` in place from N(0, 0.02), the usual initialisation of language models."""
    weight.normal_(0.0, INITIAL_STD, generator=generator)


def copy_share(target: Tensor, *share: slice) -> Callable[[Tensor], object]:
    """A function that copies the slice `share` of a tensor, one slice per leading dimension, into `target`."""

    def copy(tensor: Tensor) -> object:
        return target.copy_(tensor[share])

    return copy


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weighted(module: nn.Module) -> list[tuple[str, WeightedModule]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, WeightedModule)]
