"""Loads a checkpoint's tensors into a model. Each layer yields a slot for each tensor that it needs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm_core.model import BuildContext

MAX_LISTED_NAMES = 3  # Maximum number of missing tensors that an error names.
INITIAL_STD = 0.02  # Standard deviation of random weights.


class WeightError(ValueError):
    """A checkpoint that does not fit the model. The message names the tensor in one line."""


class WeightSlot(NamedTuple):
    """Receives one tensor of the checkpoint.

    shape: shape of the whole tensor.
    copy: copies this rank's share of the tensor into the layer.
    dtype: required dtype of the tensor; None for any floating-point dtype of 16 bits or more.
    """

    shape: tuple[int, ...]
    copy: Callable[[Tensor], object]
    dtype: torch.dtype | None = None

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether the tensor may have `dtype`."""
        return dtype == self.dtype if self.dtype is not None else dtype.is_floating_point and dtype.itemsize > 1


class WeightedModule(nn.Module, ABC):
    """A layer that owns weights.

    Weights are plain attributes: attributes are faster to read than parameters, and `finish_loading` may replace them.
    """

    def __init__(self, build: BuildContext):
        super().__init__()
        self.device = build.device
        self.dtype = build.dtype

    def allocate(self, *shape: int) -> Tensor:
        """An uninitialised tensor of this layer's dtype on its device."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @abstractmethod
    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield pairs (name of a checkpoint tensor, slot). layer_name: dotted path of this layer in the model."""

    @abstractmethod
    def randomize(self, generator: torch.Generator) -> None:
        """Fill the weights with random numbers that keep activations in range."""

    def finish_loading(self) -> None:
        """Prepare the weights for the kernels. Called once, after all weights are loaded."""
        return


def load_weights(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], can_skip: Callable[[str], bool] = lambda _: False
) -> None:
    """Fill every slot of `module` and its submodules from `tensors`, then call each layer's `finish_loading`.

    Raises WeightError for a tensor that is missing, unexpected, repeated, or has another shape or dtype.

    tensors: each tensor's name and the whole tensor, in any order, on any device.
    can_skip: returns whether to ignore a tensor without a slot, given the tensor's name.
    """
    layers = _named_weighted_modules(module)
    slot_by_name = dict(named_slot for name, layer in layers for named_slot in layer.weight_slots(name))
    filled_names: set[str] = set()
    for name, tensor in tensors:
        slot = slot_by_name.get(name)
        shape = tuple(tensor.shape)
        if slot is None:
            if can_skip(name):
                continue
            raise WeightError(f"tensor {name} {list(shape)} is in the checkpoint, but the model has no such weight")
        if name in filled_names:
            raise WeightError(f"tensor {name} is in the checkpoint twice")
        if shape != slot.shape:
            raise WeightError(f"tensor {name} has shape {list(shape)}, but the model expects {list(slot.shape)}")
        if not slot.accepts(tensor.dtype):
            expected = "floating-point numbers of 16 bits or more" if slot.dtype is None else _dtype_name(slot.dtype)
            raise WeightError(f"tensor {name} is of {_dtype_name(tensor.dtype)}, but the model expects {expected}")
        slot.copy(tensor)
        filled_names.add(name)
        # Free the memory or the mapped file before reading the next tensor.
        del tensor
    missing_names = [name for name in slot_by_name if name not in filled_names]
    if missing_names:
        listed = ", ".join(f"{name} {list(slot_by_name[name].shape)}" for name in missing_names[:MAX_LISTED_NAMES])
        num_unlisted = len(missing_names) - MAX_LISTED_NAMES
        more = f" and {num_unlisted} more" if num_unlisted > 0 else ""
        raise WeightError(f"the checkpoint lacks {len(missing_names)} of {len(slot_by_name)} tensors: {listed}{more}")
    for _, layer in layers:
        layer.finish_loading()


def fill_random(module: nn.Module, seed: int) -> None:
    """Fill `module` with random weights and call each layer's `finish_loading`.

    One seed gives different weights on different types of devices.
    """
    layers = _named_weighted_modules(module)
    generator = torch.Generator(layers[0][1].device).manual_seed(seed)
    for _, layer in layers:
        layer.randomize(generator)
    for _, layer in layers:
        layer.finish_loading()


def fill_normal(weight: Tensor, generator: torch.Generator) -> None:
    """Draw `weight` in place from a normal distribution with the usual standard deviation of language models."""
    weight.normal_(0.0, INITIAL_STD, generator=generator)


def make_share_copier(target: Tensor, *source_slices: slice) -> Callable[[Tensor], object]:
    """Make a function that copies `tensor[source_slices]` to the beginning of `target`.

    If a slice exceeds the tensor, the copy is smaller than `target`, and the rest of `target` does not change.
    """

    def copy_share(tensor: Tensor) -> None:
        share = tensor[source_slices]
        target[tuple(slice(0, size) for size in share.shape)].copy_(share)

    return copy_share


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named_weighted_modules(module: nn.Module) -> list[tuple[str, WeightedModule]]:
    return [(name, child) for name, child in module.named_modules() if isinstance(child, WeightedModule)]
