"""Products of a few rows with a matrix on the CPU, for passes over one to some hundred tokens.

A pass of a few tokens has to read every weight once, and torch's product takes a multiple of that time. Here a block of
the matrix is read once and multiplied with all rows of states, four at a time, while it is in the second cache.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import torch
import torch.nn.functional as F

from specsim.io.compiled import njit

BLOCK = 32768  # weights of a block: 128 KiB, which the second cache holds beside the states
ZERO = np.float32(0)
SUMS = {"reassoc", "contract", "nsz"}  # sums in any order; NaN and infinity stay what they are


def skinny_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T.

    Parameters
    ----------
    x : torch.Tensor
        States, [..., d].
    weight : torch.Tensor
        Matrix, [m, d].

    Returns
    -------
    torch.Tensor
        [..., m]. Sums are rounded in another order than by `torch.nn.functional.linear`, which computes what does not
        suit: other devices and types than float32 on the CPU, several threads, and gradients.

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
    out = torch.empty(rows, len(weight))
    _product(weight.detach().numpy(), x.detach().reshape(rows, -1).numpy(), out.numpy())
    return out.view(*x.shape[:-1], len(weight))


def _suits(tensor: torch.Tensor) -> bool:
    plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not (tensor.requires_grad and torch.is_grad_enabled())


# Each sum is a variable, which stays in a register: of rows r and on of x with weights, written to column o of out.


@nb.njit(fastmath=SUMS, inline="always")
def _one(weights: Any, x: Any, out: Any, r: int, o: int) -> None:
    x0 = x[r]
    a = ZERO
    for k in range(len(weights)):
        a += weights[k] * x0[k]
    out[r, o] = a


@nb.njit(fastmath=SUMS, inline="always")
def _two(weights: Any, x: Any, out: Any, r: int, o: int) -> None:
    x0, x1 = x[r], x[r + 1]
    a = b = ZERO
    for k in range(len(weights)):
        w = weights[k]
        a += w * x0[k]
        b += w * x1[k]
    out[r, o], out[r + 1, o] = a, b


@nb.njit(fastmath=SUMS, inline="always")
def _three(weights: Any, x: Any, out: Any, r: int, o: int) -> None:
    x0, x1, x2 = x[r], x[r + 1], x[r + 2]
    a = b = c = ZERO
    for k in range(len(weights)):
        w = weights[k]
        a += w * x0[k]
        b += w * x1[k]
        c += w * x2[k]
    out[r, o], out[r + 1, o], out[r + 2, o] = a, b, c


@nb.njit(fastmath=SUMS, inline="always")
def _four(weights: Any, x: Any, out: Any, r: int, o: int) -> None:
    x0, x1, x2, x3 = x[r], x[r + 1], x[r + 2], x[r + 3]
    a = b = c = d = ZERO
    for k in range(len(weights)):
        w = weights[k]
        a += w * x0[k]
        b += w * x1[k]
        c += w * x2[k]
        d += w * x3[k]
    out[r, o], out[r + 1, o], out[r + 2, o], out[r + 3, o] = a, b, c, d


@nb.njit(fastmath=SUMS, inline="always")
def _four_of_two(weights: Any, others: Any, x: Any, out: Any, r: int, o: int) -> None:
    """`_four` for two rows of the matrix at once, which halves the reads of x."""
    x0, x1, x2, x3 = x[r], x[r + 1], x[r + 2], x[r + 3]
    a = b = c = d = e = f = g = h = ZERO
    for k in range(len(weights)):
        w, v = weights[k], others[k]
        a += w * x0[k]
        b += w * x1[k]
        c += w * x2[k]
        d += w * x3[k]
        e += v * x0[k]
        f += v * x1[k]
        g += v * x2[k]
        h += v * x3[k]
    out[r, o], out[r + 1, o], out[r + 2, o], out[r + 3, o] = a, b, c, d
    out[r, o + 1], out[r + 1, o + 1], out[r + 2, o + 1], out[r + 3, o + 1] = e, f, g, h


@njit(nogil=True, fastmath=SUMS)
def _product(weight: Any, x: Any, out: Any) -> None:
    """Write out [n, m] = x [n, d] @ weight [m, d].T."""
    n, (m, d) = len(x), weight.shape
    fours = n - n % 4
    block = max(BLOCK // d, 1)
    for first in range(0, m, block):
        end = min(first + block, m)
        for r in range(0, fours, 4):
            single = first
            if r > 0:  # from memory, which the first four rows read, two rows of the matrix arrive later than one
                single = end - (end - first) % 2
                for o in range(first, single, 2):
                    _four_of_two(weight[o], weight[o + 1], x, out, r, o)
            for o in range(single, end):
                _four(weight[o], x, out, r, o)
        for o in range(first, end):
            if n - fours == 1:
                _one(weight[o], x, out, fours, o)
            elif n - fours == 2:
                _two(weight[o], x, out, fours, o)
            elif n - fours == 3:
                _three(weight[o], x, out, fours, o)
