"""torch.compile for what lies between attention operators: one function for any number of rows, shared by all layers.

Inductor fuses what is elementwise with the norms around it, and leaves products to cuBLAS. This room must not know what
a compiled function computes.
"""

import os
from collections.abc import Callable
from types import FunctionType
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from nanovllm_kernels.gemm import OWN_ROWS
from nanovllm_kernels.platform import kept_directory

P = ParamSpec("P")
R = TypeVar("R")

BACKEND = "inductor"
# Fewer rows have kernels of their own, where their weight has the shape for it, with norm, gate or residual in them.
LEAST_ROWS = OWN_ROWS + 1


def compiled(function: Callable[Concatenate[Tensor, P], R], least_rows: int) -> Callable[Concatenate[Tensor, P], R]:
    """A module's `function`, compiled for calls whose first argument has `least_rows` rows or more; for fewer as it is.

    Every argument that is a tensor has that number of rows, which may be any from call to call. Of all others (modules,
    tuples) only the contents of tensors may differ. It compiles at the first call with several rows, and where
    `least_rows` is 1 at the first with one: both belong before anything is served.
    """
    _keep_what_is_compiled()
    # What is compiled is kept by code object: with one of its own, this function knows nothing of another model's.
    plain = cast(FunctionType, function)
    own = FunctionType(plain.__code__.replace(), plain.__globals__)
    fast = torch.compile(own, fullgraph=True, dynamic=False, backend=BACKEND)
    is_marked = False

    def call(rows: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal is_marked
        if rows.shape[0] < least_rows:
            return function(rows, *args, **kwargs)
        if not is_marked and rows.shape[0] > 1:
            for argument in (rows, *args):
                if isinstance(argument, Tensor):
                    torch._dynamo.mark_dynamic(argument, 0)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            is_marked = True
        return fast(rows, *args, **kwargs)

    return call


def _keep_what_is_compiled() -> None:
    """Have Inductor keep its results; where that can't be, it takes the system's directory for temporary files."""
    directory = kept_directory("inductor")
    if directory is None:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory))
    # A handful of kernels is no work for a pool of processes, each with a torch of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
