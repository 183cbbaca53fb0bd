"""Compiles functions that all layers of a model share."""

import os
from collections.abc import Callable
from types import FunctionType
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from nanovllm_kernels.gemm import MAX_TRITON_KERNEL_ROWS
from nanovllm_kernels.platform import make_cache_directory

Params = ParamSpec("Params")
Result = TypeVar("Result")

BACKEND = "inductor"  # The backend of torch.compile.
# For fewer rows, the Triton kernels of nanovllm_kernels are faster than compiled code.
MIN_COMPILED_ROWS = MAX_TRITON_KERNEL_ROWS + 1


def compile_for_rows(
    function: Callable[Concatenate[Tensor, Params], Result], min_rows: int
) -> Callable[Concatenate[Tensor, Params], Result]:
    """Compile `function` for calls with at least `min_rows` rows; calls with fewer rows run uncompiled.

    All tensor arguments of one call must have the same number of rows. Other arguments may be objects that hold
    tensors, such as the weights of any layer. The function is compiled once for all numbers of rows above 1.
    If `min_rows` is 1, the function is also compiled once for one row.
    """
    set_cache_directories()
    # torch.compile caches by code object. A copy gives each model its own cache.
    python_function = cast(FunctionType, function)
    copied_function = FunctionType(python_function.__code__.replace(), python_function.__globals__)
    compiled_function = torch.compile(copied_function, fullgraph=True, dynamic=False, backend=BACKEND)
    has_dynamic_rows = False

    def call_by_num_rows(rows: Tensor, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        nonlocal has_dynamic_rows
        if rows.shape[0] < min_rows:
            return function(rows, *args, **kwargs)
        if not has_dynamic_rows and rows.shape[0] > 1:
            for argument in (rows, *args):
                if isinstance(argument, Tensor):
                    torch._dynamo.mark_dynamic(argument, 0)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            has_dynamic_rows = True
        return compiled_function(rows, *args, **kwargs)

    return call_by_num_rows


def set_cache_directories() -> None:
    """Make all compilers cache compiled code in the project's cache. Call before the first kernel runs."""
    # Unless TRITON_CACHE_DIR is set, torch.compile changes Triton's directory, and kernels would be in two directories.
    # By default, CuTe DSL and QuACK (which FlashAttention imports) use the system's temporary directory.
    variables = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUTE_DSL_CACHE_DIR": "cute",
        "CUTE_EXPERIMENTAL_DSL_CACHE_DIR": "cute",
        "QUACK_CACHE_DIR": "quack",
    }
    for variable, name in variables.items():
        directory = make_cache_directory(name)
        if directory is not None:
            os.environ.setdefault(variable, str(directory))
    # Few kernels are compiled. A pool of processes, which all import torch, would cost more time than it saves.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
