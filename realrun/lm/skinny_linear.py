"""Products of a few rows with a matrix on the CPU, for passes over one to sixteen tokens.

A pass of a few tokens has to read every weight once, and torch's product takes a multiple of that time. Here a row of
the matrix, or four, are read once and multiplied with all rows of states, while they are in the first cache.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import torch
import torch.nn.functional as F

MOST_ROWS = 16  # beyond, torch's product is as fast
FEWEST_SQUARED = 7  # rows of states; fewer are faster with a row of the matrix at a time
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
        suit: other devices and types than float32 on the CPU, several threads, gradients, and more than 16 rows.

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
    if not (0 < rows <= MOST_ROWS and _suits(x) and _suits(weight)) or torch.get_num_threads() > 1:
        return F.linear(x, weight)
    out = torch.empty(rows, len(weight))
    _product(weight.detach().numpy(), x.detach().reshape(rows, -1).numpy(), out.numpy())
    return out.view(*x.shape[:-1], len(weight))


def _suits(tensor: torch.Tensor) -> bool:
    plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not (tensor.requires_grad and torch.is_grad_enabled())


@nb.njit(fastmath=SUMS, inline="always")
def _one(row: Any, x: Any, out: Any, j: int, o: int) -> None:
    a = ZERO
    for k in range(row.shape[0]):
        a += row[k] * x[j, k]
    out[j, o] = a


@nb.njit(fastmath=SUMS, inline="always")
def _two(row: Any, x: Any, out: Any, j: int, o: int) -> None:
    a = b = ZERO
    for k in range(row.shape[0]):
        w = row[k]
        a += w * x[j, k]
        b += w * x[j + 1, k]
    out[j, o], out[j + 1, o] = a, b


@nb.njit(fastmath=SUMS, inline="always")
def _three(row: Any, x: Any, out: Any, j: int, o: int) -> None:
    a = b = c = ZERO
    for k in range(row.shape[0]):
        w = row[k]
        a += w * x[j, k]
        b += w * x[j + 1, k]
        c += w * x[j + 2, k]
    out[j, o], out[j + 1, o], out[j + 2, o] = a, b, c


@nb.njit(fastmath=SUMS, inline="always")
def _four(row: Any, x: Any, out: Any, j: int, o: int) -> None:
    a = b = c = d = ZERO
    for k in range(row.shape[0]):
        w = row[k]
        a += w * x[j, k]
        b += w * x[j + 1, k]
        c += w * x[j + 2, k]
        d += w * x[j + 3, k]
    out[j, o], out[j + 1, o], out[j + 2, o], out[j + 3, o] = a, b, c, d


@nb.njit(fastmath=SUMS, inline="always")
def _five(row: Any, x: Any, out: Any, j: int, o: int) -> None:
    a = b = c = d = e = ZERO
    for k in range(row.shape[0]):
        w = row[k]
        a += w * x[j, k]
        b += w * x[j + 1, k]
        c += w * x[j + 2, k]
        d += w * x[j + 3, k]
        e += w * x[j + 4, k]
    out[j, o], out[j + 1, o], out[j + 2, o], out[j + 3, o], out[j + 4, o] = a, b, c, d, e


@nb.njit(fastmath=SUMS, inline="always")
def _square(w: Any, x: Any, out: Any, j: int, o: int) -> None:
    """Multiply four rows of the matrix with four of states: each number that is loaded serves four products."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = ZERO
    for k in range(x.shape[1]):
        w0, w1, w2, w3 = w[o, k], w[o + 1, k], w[o + 2, k], w[o + 3, k]
        s = x[j, k]
        a0, a1, a2, a3 = a0 + w0 * s, a1 + w1 * s, a2 + w2 * s, a3 + w3 * s
        s = x[j + 1, k]
        b0, b1, b2, b3 = b0 + w0 * s, b1 + w1 * s, b2 + w2 * s, b3 + w3 * s
        s = x[j + 2, k]
        c0, c1, c2, c3 = c0 + w0 * s, c1 + w1 * s, c2 + w2 * s, c3 + w3 * s
        s = x[j + 3, k]
        d0, d1, d2, d3 = d0 + w0 * s, d1 + w1 * s, d2 + w2 * s, d3 + w3 * s
    out[j, o], out[j, o + 1], out[j, o + 2], out[j, o + 3] = a0, a1, a2, a3
    out[j + 1, o], out[j + 1, o + 1], out[j + 1, o + 2], out[j + 1, o + 3] = b0, b1, b2, b3
    out[j + 2, o], out[j + 2, o + 1], out[j + 2, o + 2], out[j + 2, o + 3] = c0, c1, c2, c3
    out[j + 3, o], out[j + 3, o + 1], out[j + 3, o + 2], out[j + 3, o + 3] = d0, d1, d2, d3


@nb.njit(fastmath=SUMS, inline="always")
def _row(row: Any, x: Any, out: Any, first: int, o: int) -> None:
    """Multiply a row of the matrix with the rows of states from `first` on."""
    n, j = x.shape[0], first
    while n - j == 4 or n - j > 5:
        _four(row, x, out, j, o)
        j += 4
    if n - j == 5:
        _five(row, x, out, j, o)
    elif n - j == 3:
        _three(row, x, out, j, o)
    elif n - j == 2:
        _two(row, x, out, j, o)
    elif n - j == 1:
        _one(row, x, out, j, o)


@nb.njit(cache=True, nogil=True, fastmath=SUMS)
def _product(weight: Any, x: Any, out: Any) -> None:
    """Write out [n, m] = x [n, d] @ weight [m, d].T. Each sum is a variable of its own, which stays in a register."""
    squared = x.shape[0] // 4 * 4 if x.shape[0] >= FEWEST_SQUARED else 0
    by_fours = weight.shape[0] // 4 * 4 if squared else 0
    for o in range(0, by_fours, 4):
        for j in range(0, squared, 4):
            _square(weight, x, out, j, o)
        if squared < x.shape[0]:
            for p in range(o, o + 4):
                _row(weight[p], x, out, squared, p)
    for o in range(by_fours, weight.shape[0]):
        _row(weight[o], x, out, 0, o)
