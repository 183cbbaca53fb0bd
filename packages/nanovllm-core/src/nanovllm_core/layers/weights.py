"""How weights get into a model: strictly, by name, each rank taking its share.

A layer with weights is a `WeightedModule`: it offers slots, which say what a checkpoint calls a tensor, how large the
whole of it is, and how this rank's share is copied. This room must not know where tensors come from.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm_core.model import BuildContext

NAMES_SHOWN = 3
INITIAL_STD = 0.02


class WeightError(ValueError):
    """A checkpoint that is not the model's; the message, one line, names the tensor and what was expected of it."""


class Slot(NamedTuple):
    """A place for one tensor: the shape of the whole of it, and what copies this rank's share out of it.

    dtype: what it must be stored as; None for any floating-point numbers of 16 bits or more.
    """

    shape: tuple[int, ...]
    copy: Callable[[Tensor], object]
    dtype: torch.dtype | None = None

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the tensor may be stored so."""
        return dtype == self.dtype if self.dtype is not None else dtype.is_floating_point and dtype.itemsize > 1


class WeightedModule(nn.Module, ABC):
    """A layer that owns weights.

    They are plain attributes rather than parameters: no gradient is ever taken, `finish` may swap them for another
    form, and looking one up is then a dictionary access in a path that runs hundreds of times a step.
    """

    def __init__(self, build: BuildContext):
        super().__init__()
        self.device = build.device
        self.dtype = build.dtype

    def allocate(self, *shape: int) -> Tensor:
        """Uninitialised memory of this layer's dtype on its device."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @abstractmethod
    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Names in the checkpoint and their slots; `name` is the dotted path of this module within the model."""

    @abstractmethod
    def randomize(self, generator: torch.Generator) -> None:
        """Fill the weights with numbers that keep activations in range, on the device they are on."""

    def finish(self) -> None:
        """Called once the weights are there: bring them into the form that runs fastest."""
        return


def load_weights(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], ignore: Callable[[str], bool] = lambda _: False
) -> None:
    """Fill every slot of `module` and of its parts exactly once from `tensors`, then finish them.

    tensors: names and whole tensors, in any order, on any device. No more than one is held at a time.
    ignore: says of a name without a slot whether that is all right.
    Raises WeightError for a tensor that is missing, unexpected, there twice, of another shape, quantised where the
    model's is not or the other way round.
    """
    layers = _weighted(module)
    slots = dict(slot for name, layer in layers for slot in layer.slots(name))
    filled: set[str] = set()
    for name, tensor in tensors:
        slot = slots.get(name)
        found = tuple(tensor.shape)
        if slot is None:
            if ignore(name):
                continue
            raise WeightError(f"tensor {name} {list(found)} is in the checkpoint, but the model has no such weight")
        if name in filled:
            raise WeightError(f"tensor {name} is in the checkpoint twice")
        if found != slot.shape:
            raise WeightError(f"tensor {name} has shape {list(found)}, but the model expects {list(slot.shape)}")
        if not slot.takes(tensor.dtype):
            wanted = "floating-point numbers of 16 or 32 bits" if slot.dtype is None else _name(slot.dtype)
            raise WeightError(f"tensor {name} is of {_name(tensor.dtype)}, but the model expects {wanted}")
        slot.copy(tensor)
        filled.add(name)
        # While the next one is read, this one's memory, or its whole file's where that is mapped, is free again.
        del tensor
    missing = [name for name in slots if name not in filled]
    if missing:
        shown = ", ".join(f"{name} {list(slots[name].shape)}" for name in missing[:NAMES_SHOWN])
        more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
        raise WeightError(f"the checkpoint lacks {len(missing)} of {len(slots)} tensors: {shown}{more}")
    for _, layer in layers:
        layer.finish()


def fill_random(module: nn.Module, seed: int) -> None:
    """Give every layer of `module` random weights, the same ones for the same seed and kind of device; finish them."""
    layers = _weighted(module)
    generator = torch.Generator(layers[0][1].device).manual_seed(seed)
    for _, layer in layers:
        layer.randomize(generator)
    for _, layer in layers:
        layer.finish()


def fill_normal(weight: Tensor, generator: torch.Generator) -> None:
    """Draw `weight` in place from N(0, 0.02), as most language models begin."""
    weight.normal_(0.0, INITIAL_STD, generator=generator)


def copy_share(target: Tensor, *share: slice) -> Callable[[Tensor], object]:
    """What copies a part of a tensor, one slice a dimension from the first on, into `target`."""

    def copy(tensor: Tensor) -> object:
        return target.copy_(tensor[share])

    return copy


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weighted(module: nn.Module) -> list[tuple[str, WeightedModule]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, WeightedModule)]
