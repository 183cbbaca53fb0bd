"""Fixes of Triton 3.6's interpreter that several processes apply."""

from collections.abc import Callable

from triton.runtime import interpreter


def make_numpy_2_4_patch() -> Callable[..., None]:
    """Return a replacement of `interpreter._patch_lang_tensor`, whose conversion to integers numpy 2.4 rejects.

    https://github.com/triton-lang/triton/issues/9171, fixed in later versions.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor_and_index
