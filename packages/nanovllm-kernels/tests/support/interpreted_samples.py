"""Samples of parameters for Triton's interpreter, which is slow."""

import os
from collections.abc import Collection
from itertools import product

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def sample_product(*axes: Collection[object]) -> list[tuple[object, ...]]:
    """Returns the combinations of one value of each axis.

    In the interpreter, returns only those whose indices have an even sum. This sample contains every value, and with
    three axes every pair of values.
    """
    indices = product(*(range(len(axis)) for axis in axes))
    return [
        values
        for values, index in zip(product(*axes), indices, strict=True)
        if not IS_INTERPRETED or sum(index) % 2 == 0
    ]
