"""Patches Triton 3.6's interpreter to support numpy 2.4 and to skip repeated work. Results stay the same."""

import dataclasses
import functools
import math

import triton.language as tl
from triton.runtime import interpreter


def change_interpreter() -> None:
    _fix_for_numpy_2_4()
    _patch_language_once()
    _cache_types_and_shapes()
    _drop_unused_overflow_checks()


def _fix_for_numpy_2_4() -> None:
    """Replace a conversion that numpy 2.4 rejects: https://github.com/triton-lang/triton/issues/9171."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _patch_language_once() -> None:
    patch = interpreter._patch_lang
    patched_uses: set[tuple[bool, bool]] = set()

    def patch_once(kernel):
        values = kernel.__globals__.values()
        used = any(value is tl for value in values), any(value is tl.core for value in values)
        if used not in patched_uses:
            # The next call needs the patched functions. The returned scope would restore the original functions.
            patch(kernel)
            patched_uses.add(used)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _cache_types_and_shapes() -> None:
    find_dtype = interpreter._get_np_dtype
    find_scalar_dtype = functools.cache(find_dtype)

    def get_dtype(dtype):
        return find_dtype(dtype) if isinstance(dtype.scalar, tl.pointer_type) else find_scalar_dtype(dtype.scalar)

    make_shape = functools.cache(lambda shape: tl.core.tuple([tl.constexpr(size) for size in shape]))
    make_numel = functools.cache(lambda shape: tl.constexpr(math.prod(shape)))

    def initialize_tensor(self, handle, tensor_type) -> None:
        sizes = tensor_type.shape if tensor_type.is_block() else ()
        shape = tuple(tl.core._unwrap_if_constexpr(size) for size in sizes)
        self.handle, self.type, self.dtype = handle, tensor_type, tensor_type.scalar
        self.shape, self.numel = make_shape(shape), make_numel(shape)

    interpreter._get_np_dtype = get_dtype
    tl.tensor.__init__ = initialize_tensor


def _drop_unused_overflow_checks() -> None:
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "Triton's interpreter now uses the result of its overflow checks"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
