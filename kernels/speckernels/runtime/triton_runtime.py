"""Import triton so that kernels run on a GPU, or interpreted without one.

The choice holds for the whole process, even if triton was imported before.
Kernel files import `triton` and `tl` from here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from speckernels.runtime.errors import Unavailable, Unsupported

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _interpret_library() -> None:
    """Redefine the functions of Triton's own library as interpreted.

    Triton decides this when a function is defined, and torch may have imported the library before.
    """
    from triton.runtime.jit import JITFunction

    for name in [name for name in sys.modules if name.startswith("triton.language")]:
        for key, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, JITFunction):
                setattr(sys.modules[name], key, triton.jit(value.fn))


def _patch_once_a_launch() -> None:
    """Patch Triton's language once per launch and module of kernels instead of at every call of a device function.

    The repeated patches have no effect and take almost half of the time of an interpreted kernel.
    """
    from triton.runtime import interpreter

    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            return patch(function)
        return None  # the launch restores what its own patch changed

    def launch_patched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_patched


def _index_by_the_only_element() -> None:
    """Allow an interpreted scalar, an array of one element, as a bound of `range`.

    Triton before 3.7 lets numpy convert it, which since 2.5 converts only arrays without dimensions.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


if INTERPRETED:
    _interpret_library()
    _index_by_the_only_element()
    _patch_once_a_launch()


# No contraction to fused multiply-add: backends must agree to the bit where they choose tokens.
OPTIONS = {"enable_fp_fusion": False}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on the GPU of its tensors, or interpreted.

    Raises Unavailable if a block needs more than the GPU has, and Unsupported for tensors on the CPU beside a GPU.
    """
    try:
        kernel[grid](*args, **OPTIONS, **constants)
    except OutOfResources as error:
        raise Unavailable(f"the triton backend: {error}") from error
    except ValueError as error:
        if "cpu tensor" not in str(error):
            raise
        raise Unsupported("the triton backend runs on the GPU here; move the tensors there") from error


@dataclass(frozen=True)
class Variant:
    """Kernel with the argument types (Triton's notation) and constants of a launch."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)  # numbers of warps and stages
    shared_limit_bytes: int | None = None  # of a block on the target GPUs

    def compile(self, capability: int) -> Any:
        """Compile the kernel for a GPU of this compute capability (80, 90, ...); needs no GPU."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature = {name: self.signature.get(name, "constexpr") for name in self.kernel.arg_names}
        source = ASTSource(self.kernel, signature, self.constants)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**OPTIONS, **self.options})


__all__ = ["INTERPRETED", "Variant", "launch", "tl", "triton"]
