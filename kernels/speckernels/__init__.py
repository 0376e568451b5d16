"""Operations of speculative decoding on the GPU: one signature each, three backends behind it.

`reference` is short torch code and defines the correct result; `triton` and `cuda` have to match
it. On CPU tensors, `triton` runs interpreted and `cuda` runs the same kernel
sources on emulated threads, so that everything but speed can be tested without a GPU.
"""

from speckernels.ops.chain_rejection import ChainVerified, chain_rejection
from speckernels.ops.compact_kv import compact_kv
from speckernels.ops.draft_statistics import DraftStatistics, draft_statistics
from speckernels.ops.results import Verified
from speckernels.ops.tree_attention import pack_bits, tree_attention
from speckernels.ops.tree_rejection import SiblingKind, tree_rejection
from speckernels.ops.typical_acceptance import typical_acceptance
from speckernels.runtime.dispatch import BACKENDS, backend_for, use_backend
from speckernels.runtime.errors import Unavailable, Unsupported

__all__ = [
    "BACKENDS",
    "ChainVerified",
    "DraftStatistics",
    "SiblingKind",
    "Unavailable",
    "Unsupported",
    "Verified",
    "backend_for",
    "chain_rejection",
    "compact_kv",
    "draft_statistics",
    "pack_bits",
    "tree_attention",
    "tree_rejection",
    "typical_acceptance",
    "use_backend",
]
