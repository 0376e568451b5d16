"""Import triton so that kernels run on a GPU, or interpreted where there is none.

The choice holds for the whole process, whether or not somebody imported triton before.
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
from triton.tools.tensor_descriptor import TensorDescriptor

from speckernels.runtime.errors import Unavailable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _interpret_library() -> None:
    """Define the functions of Triton's own library anew, interpreted.

    Triton decides when a function is defined, and torch may have imported the library before.
    """
    from triton.runtime.jit import JITFunction

    for name in [name for name in sys.modules if name.startswith("triton.language")]:
        for key, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, JITFunction):
                setattr(sys.modules[name], key, triton.jit(value.fn))


def _patch_once_a_launch() -> None:
    """Patch Triton's language once a launch for each module of kernels, not again at every call of a device function.

    Those patches set what is set already, and would take near half of the time of an interpreted kernel.
    """
    from triton.runtime import interpreter

    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            return patch(function)
        return None  # the launch puts back what its own patch changed

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _index_by_the_only_element() -> None:
    """Let an interpreted scalar, an array of one element, be a bound of `range`.

    Triton before 3.7 leaves its conversion to numpy, which from 2.5 on converts arrays without dimensions alone.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_too


if INTERPRETED:
    _interpret_library()
    _index_by_the_only_element()
    _patch_once_a_launch()


# No contraction to fused multiply-add: backends must agree to the bit where they choose tokens.
OPTIONS = {"enable_fp_fusion": False}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on the GPU of its tensors, or interpreted; Unavailable where a block needs more than the GPU has."""
    try:
        kernel[grid](*args, **OPTIONS, **constants)
    except OutOfResources as error:
        raise Unavailable(f"the triton backend: {error}") from error


@dataclass(frozen=True)
class Variant:
    """A kernel with the argument types (Triton's notation) and constants it is launched with."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # number of warps, of stages
    shared_limit_bytes: int | None = None  # of a block on the GPUs that it is made for

    def compile(self, capability: int) -> Any:
        """Triton's compiled kernel for a GPU of this compute capability (80, 90, ...); needs no GPU."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature = {name: self.signature.get(name, "constexpr") for name in self.kernel.arg_names}
        source = ASTSource(self.kernel, signature, self.constants)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**OPTIONS, **self.options})


__all__ = ["INTERPRETED", "TensorDescriptor", "Variant", "launch", "tl", "triton"]
