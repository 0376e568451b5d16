"""Synthetic traces by a rate of acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.acceptance.files import load_model
from specsim.acceptance.iid import IID
from specsim.acceptance.per_position import PerPosition
from specsim.acceptance.synthetic import AcceptanceModel
from specsim.acceptance.synthetic import generate as generate_from_model
from specsim.trace.trace import Trace


def generate(
    acceptance: float | Sequence[float] | str | PathLike[str] | AcceptanceModel = 0.8,
    *,
    sequences: int = 100,
    output_tokens: int | npt.ArrayLike = 128,
    depth: int = 16,
    prompt_tokens: int = 64,
    seed: int = 0,
) -> Trace:
    """Generate a synthetic trace, as if a drafter with this acceptance had been recorded.

    Parameters
    ----------
    acceptance : float, sequence of float, path or AcceptanceModel
        Probability that a drafted token is accepted if all before it were: one for every place of a draft, or one for
        each. Its confidence then tells a policy nothing; a model, or its file as `specsim acceptance fit` writes it,
        of the kind "difficulty" has confidence that does.
    sequences : int
        Sequences S.
    output_tokens : int or array_like
        Output tokens of each sequence, or of each its own [S].
    depth : int
        Longest draft recorded, in tokens; at most as many as rates are given.
    prompt_tokens : int
        Prompt tokens of each sequence, on which costs depend.
    seed : int
        Seed of all randomness.

    Returns
    -------
    Trace
        The same for the same arguments.

    Raises
    ------
    InputError
        For a probability outside [0, 1], sizes below 1, and depths that the model does not know.
    TypeError
        For what is no acceptance.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, section 3.1 (acceptance that is independent and identically distributed).

    Examples
    --------
    >>> import specsim
    >>> specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    Trace: 20 sequences, 1,200 tokens, depth 8, target synthetic, drafter synthetic (iid), greedy
    >>> trace = specsim.generate(acceptance=[0.9, 0.7, 0.4], depth=3)
    >>> round(float((trace.match_len > 0).mean()), 1)
    0.9
    """
    model = _as_model(acceptance)
    return generate_from_model(model, sequences, output_tokens, depth, seed, prompt_tokens=prompt_tokens)


def _as_model(acceptance: object) -> Any:
    if isinstance(acceptance, Real):
        return IID(float(acceptance))
    if isinstance(acceptance, str | PathLike):
        return load_model(acceptance)
    if isinstance(acceptance, Sequence | np.ndarray) and all(isinstance(rate, Real) for rate in acceptance):
        return PerPosition(tuple(map(float, acceptance)))
    if hasattr(acceptance, "draw") and not isinstance(acceptance, type):
        return acceptance  # a user's own model
    raise TypeError(
        f"acceptance is a {type(acceptance).__name__}; expected a probability such as 0.8, one for each place of a "
        "draft such as [0.9, 0.7], an acceptance model, or its file"
    )
