"""Finds schemas that may share a value with a shape."""

from collections.abc import Sequence

from nanovllm_core.grammar.schemas.shapes import ConstantShape, Shape


class OverlapIndex:
    """Finds the options of a `oneOf` that may share a value with a shape, without a comparison with each option."""

    def __init__(self, options: Sequence[tuple[Shape, ...]]):
        self._indices_by_key: dict[str, set[int]] = {}
        self._indices_by_type: dict[type[Shape], set[int]] = {}
        for index, option in enumerate(options):
            for shape in option:
                if isinstance(shape, ConstantShape):
                    self._indices_by_key.setdefault(shape.key, set()).add(index)
                self._indices_by_type.setdefault(type(shape), set()).add(index)

    def find(self, shape: Shape) -> list[int]:
        """The indices of the options that may share a value with `shape`, in ascending order."""
        if not isinstance(shape, ConstantShape):
            types = (type(shape), ConstantShape)
            return sorted(set[int]().union(*(self._indices_by_type.get(kind, ()) for kind in types)))
        general = (indices for kind, indices in self._indices_by_type.items() if kind is not ConstantShape)
        return sorted(set(self._indices_by_key.get(shape.key, ())).union(*general))
