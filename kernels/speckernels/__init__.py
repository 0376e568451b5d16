"""Operations of speculative decoding on the GPU: one signature each, three backends behind it.

`reference` is short torch code and defines what is correct; `triton` and `cuda` answer to
it. On tensors of the CPU, `triton` runs interpreted and `cuda` runs the very same kernel
sources on emulated threads, so that everything but speed is tested without a GPU.
"""

from speckernels.chain_rejection import ChainVerified, chain_rejection
from speckernels.compact_kv import compact_kv
from speckernels.dispatch import BACKENDS, Unsupported, backend_for, use_backend
from speckernels.draft_statistics import DraftStatistics, draft_statistics
from speckernels.greedy_verify import greedy_verify
from speckernels.space_layout import SpaceLayout, space_layout
from speckernels.tree_attention import tree_attention
from speckernels.tree_metadata import TreeMetadata, tree_metadata
from speckernels.tree_rejection import SiblingKind, tree_rejection
from speckernels.typical_acceptance import typical_acceptance
from speckernels.verified import Verified

__all__ = [
    "BACKENDS",
    "ChainVerified",
    "DraftStatistics",
    "SiblingKind",
    "SpaceLayout",
    "TreeMetadata",
    "Unsupported",
    "Verified",
    "backend_for",
    "chain_rejection",
    "compact_kv",
    "draft_statistics",
    "greedy_verify",
    "space_layout",
    "tree_attention",
    "tree_metadata",
    "tree_rejection",
    "typical_acceptance",
    "use_backend",
]
