"""Operations of speculative decoding on the GPU: one signature each, three backends behind it.

`reference` is short torch code and defines what is correct; `triton` and `cuda` answer to
it. On tensors of the CPU, `triton` runs interpreted and `cuda` runs the very same kernel
sources on emulated threads, so that everything but speed is tested without a GPU.
"""

from speckernels.dispatch import BACKENDS, Unsupported, backend_for, use_backend
from speckernels.tree_metadata import tree_metadata

__all__ = [
    "BACKENDS",
    "Unsupported",
    "backend_for",
    "tree_metadata",
    "use_backend",
]
