"""Products of a few rows with a matrix on the CPU, for passes over one to some hundred tokens.

A pass of a few tokens has to read every weight once, and torch's product takes a multiple of that time. For up to three
tokens, a row of the matrix is read once and multiplied with all rows of states while it is in the first cache. For
more, oneDNN multiplies with a copy of the matrix in its own layout, which doubles the memory of the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba as nb
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from specsim.io.compiled import njit

MOST_ROWS = 3  # beyond, the copy is faster
KEPT_FREE = 0.25  # share of the machine's memory that copies leave
MEMORY = Path("/proc/meminfo")  # elsewhere than on Linux no copies are made
ZERO = np.float32(0)
SUMS = {"reassoc", "contract", "nsz"}  # sums in any order; NaN and infinity stay what they are

_copies = WeakTensorKeyDictionary()  # of matrices, with the version of the matrix that was copied


def skinny_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T.

    Parameters
    ----------
    x : torch.Tensor
        States, [..., d].
    weight : torch.Tensor
        Matrix, [m, d]. The copy that products of four rows and more are made with lives as long as this object.

    Returns
    -------
    torch.Tensor
        [..., m]. Sums are rounded in another order than by `torch.nn.functional.linear`, which computes what does not
        suit: other devices and types than float32 on the CPU, several threads, gradients, and four rows and more where
        memory is short.

    Examples
    --------
    >>> import torch
    >>> from realrun.lm.skinny_linear import skinny_linear
    >>> with torch.inference_mode():
    ...     skinny_linear(torch.ones(2, 3), torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]))
    tensor([[6., 1.],
            [6., 1.]])
    """
    rows = x.numel() // x.shape[-1]
    if not (rows and _suits(x) and _suits(weight)) or torch.get_num_threads() > 1:
        return F.linear(x, weight)
    if rows > MOST_ROWS:
        copy = _copy(weight)
        return F.linear(x, weight) if copy is None else _packed_product(x, copy)
    out = torch.empty(rows, len(weight))
    _product(weight.detach().numpy(), x.detach().reshape(rows, -1).numpy(), out.numpy())
    return out.view(*x.shape[:-1], len(weight))


def _suits(tensor: torch.Tensor) -> bool:
    plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not (tensor.requires_grad and torch.is_grad_enabled())


def _copy(weight: torch.Tensor) -> torch.Tensor | None:
    """Copy a matrix into oneDNN's layout, or find its copy; None if memory is short."""
    version = None if weight.is_inference() else weight._version
    known = _copies.get(weight)
    if known is None or known[0] != version:
        known = version, _packed(weight.detach()) if _has_room(weight.nbytes) else None
        _copies[weight] = known
    copy: torch.Tensor | None = known[1]
    return copy


def _packed(weight: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return copy


def _packed_product(x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.detach(), copy, None, "none", [], "")
    return out


def _has_room(size: int) -> bool:
    """Decide whether a copy of so many bytes leaves enough of the machine's memory free."""
    if not (torch.backends.mkldnn.is_available() and MEMORY.is_file()):
        return False
    lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
    total, available = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return available - size > KEPT_FREE * total


@nb.njit(fastmath=SUMS, inline="always")
def _one(row: Any, x: Any, out: Any, o: int) -> None:
    a = ZERO
    for k in range(row.shape[0]):
        a += row[k] * x[0, k]
    out[0, o] = a


@nb.njit(fastmath=SUMS, inline="always")
def _two(row: Any, x: Any, out: Any, o: int) -> None:
    a = b = ZERO
    for k in range(row.shape[0]):
        w = row[k]
        a += w * x[0, k]
        b += w * x[1, k]
    out[0, o], out[1, o] = a, b


@nb.njit(fastmath=SUMS, inline="always")
def _three(row: Any, x: Any, out: Any, o: int) -> None:
    a = b = c = ZERO
    for k in range(row.shape[0]):
        w = row[k]
        a += w * x[0, k]
        b += w * x[1, k]
        c += w * x[2, k]
    out[0, o], out[1, o], out[2, o] = a, b, c


@njit(nogil=True, fastmath=SUMS)
def _product(weight: Any, x: Any, out: Any) -> None:
    """Write out [n, m] = x [n, d] @ weight [m, d].T, n at most 3; each sum is a variable, which stays in a register."""
    n = x.shape[0]
    for o in range(weight.shape[0]):
        if n == 1:
            _one(weight[o], x, out, o)
        elif n == 2:
            _two(weight[o], x, out, o)
        else:
            _three(weight[o], x, out, o)
