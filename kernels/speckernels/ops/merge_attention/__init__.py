"""Merging attention: the results over two parts of a cache as the result over both."""

from __future__ import annotations

import torch

from speckernels.ops.results import check_tensor, describe
from speckernels.ops.tree_attention import DTYPES, lse_type
from speckernels.runtime.dispatch import register


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two parts of a cache as one over both, from the results and their log-sum-exps.

    (e^a A + e^b B) / (e^a + e^b) and log(e^a + e^b) for results A, B and log-sum-exps a, b: a prefix
    that sequences share is then read once for all of them (cascade attention).

    Parameters
    ----------
    out_a, out_b : [B, n, Hq, D], as tree_attention gives them; float16, bfloat16, float32 or float64
    lse_a, lse_b : [B, n, Hq], float32, of float64 results float64; -inf where a part was not seen

    Returns
    -------
    out : [B, n, Hq, D], contiguous, in the type of out_a; 0 where neither part was seen
    lse : [B, n, Hq], -inf where neither was

    Raises
    ------
    ValueError
        For other types or shapes.

    References
    ----------
    Milakov and Gimelshein 2018, arXiv:1805.02867; Ye et al. 2025, arXiv:2501.01005, section 2.2
    (attention states and their composition).

    Examples
    --------
    >>> import torch
    >>> part, none = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    >>> seen, unseen = torch.zeros(1, 1, 1), torch.full((1, 1, 1), -torch.inf)
    >>> merge_attention(part, seen, none, unseen)[0].tolist()
    [[[[1.0, 1.0]]]]
    """
    if out_a.dtype not in DTYPES or out_a.dim() != 4:
        raise ValueError(f"out_a is {describe(out_a)}; give a float [B, n, Hq, D]")
    check_tensor("out_b", out_b, (out_a.dtype,), out_a.shape, out_a.device)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, (lse_type(out_a),), out_a.shape[:3], out_a.device)
    if out_a.numel() == 0:
        return torch.empty_like(out_a), torch.empty_like(lse_a)
    tensors = (tensor.contiguous() for tensor in (out_a, lse_a, out_b, lse_b))
    out, lse = torch.ops.speckernels.merge_attention(*tensors)
    return out, lse


register(
    "merge_attention",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    lambda out_a, lse_a, out_b, lse_b: (torch.empty_like(out_a), torch.empty_like(lse_a)),
)
