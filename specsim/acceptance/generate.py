"""Synthetic traces by a rate of acceptance or an acceptance model, and the JSON files of such models."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import numpy as np
import numpy.typing as npt

from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.models import EOS, IID, MAX_SEED, VOCABULARY, AcceptanceModel, PerPosition
from specsim.acceptance.sources import Source, describe
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.json import checked, read_json
from specsim.trace.trace import MAX_DEPTH, Trace

KIND, VERSION = "specsim-acceptance", 1
AGAIN = "fit the model again"
MODELS: dict[str, Any] = {kind.name: kind for kind in (IID, PerPosition, Difficulty)}
ALIKE_TOKENS = 128  # output tokens of a sequence that is generated from counts
LEAST_SEQUENCES, MOST_SEQUENCES = 8, 200  # of these, so that intervals are as wide as the counts' and answers are quick


def generate(
    acceptance: float | Sequence[float] | str | PathLike[str] | AcceptanceModel = 0.8,
    sequences: int = 100,
    output_tokens: int | npt.ArrayLike = 128,
    depth: int = 16,
    seed: int = 0,
    *,
    prompt_tokens: int = 64,
) -> Trace:
    """Generate a synthetic trace, as if a drafter with this acceptance had been recorded.

    Parameters
    ----------
    acceptance : float, sequence of float, path or AcceptanceModel
        Probability that a drafted token is accepted if all before it were: a single rate, or a rate per draft
        position; the drafter's confidence is then the same everywhere. Or an acceptance model, or its file as
        `specsim acceptance fit` writes it; with the model "difficulty" the confidence predicts acceptance.
    sequences : int
        Sequences S.
    output_tokens : int or array_like
        Output tokens of every sequence, or of each [S]. Every sequence fills its budget: tokens are uniform over a
        vocabulary of 32,000 and never the end token.
    depth : int
        Longest draft recorded, in tokens; at most the number of rates.
    seed : int
        Seed of all randomness.
    prompt_tokens : int
        Prompt tokens of each sequence, on which costs depend.

    Returns
    -------
    Trace
        The same for the same arguments.

    Raises
    ------
    InputError
        For a probability outside [0, 1], sizes below 1, and depths that the model does not cover.
    TypeError
        For any other kind of acceptance.

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
    if sequences < 1 or not 1 <= depth <= MAX_DEPTH or prompt_tokens < 1:
        raise InputError(
            f"sequences={sequences}, depth={depth}, prompt_tokens={prompt_tokens}; "
            f"give at least 1 of each and depth up to {MAX_DEPTH}"
        )
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed={seed} is outside [0, {MAX_SEED}]; choose a value inside")
    lengths = np.broadcast_to(np.asarray(output_tokens, dtype=np.int64), (sequences,)).copy()
    if lengths.min() < 1:
        raise InputError(f"output_tokens={lengths.min()}; give at least 1 per sequence")
    rng = np.random.default_rng(seed)
    drafts = model.draw(lengths, depth, rng)
    token = rng.integers(EOS + 1, VOCABULARY, size=int(lengths.sum()), dtype=np.int32)
    synthetic = {"model": model.name, "parameters": dict(vars(model)), "seed": seed, "informed": model.informed}
    return Trace(
        meta={
            "target": "synthetic",
            "drafter": f"synthetic ({model.name})",
            "drafter_kind": "chain",
            "synthetic": synthetic,
            "decoding": {"mode": "greedy"},
            "depth": depth,
            "eos_token_id": [EOS],
            "dtype": "float32",
            "device": "none",
        },
        sequence_id=np.arange(sequences),
        domain=np.full(sequences, "synthetic"),
        prompt_tokens=np.full(sequences, prompt_tokens),
        budget_tokens=lengths,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        token=token,
        match_len=drafts.match_len,
        draft_token=_draft_tokens(token, drafts.match_len, depth, rng),
        prob=drafts.prob,
        confidence=drafts.confidence,
        entropy_nats=drafts.entropy_nats,
    )


def generate_alike(source: Source, *, prompt_tokens: int = 64) -> Trace:
    """Generate a trace that accepts as these counts do, by position; of about as many rounds, up to `MOST_SEQUENCES`.

    source : a trace is returned as it is
    """
    if isinstance(source, Trace):
        return source
    model = PerPosition.fit(source)
    rounds = int(describe(source)["rounds"])
    tokens = rounds * (1 + float(np.cumprod(model.alpha).sum()))
    sequences = int(np.clip(tokens / ALIKE_TOKENS, LEAST_SEQUENCES, MOST_SEQUENCES))
    return generate(model.alpha, sequences, ALIKE_TOKENS, len(model.alpha), prompt_tokens=prompt_tokens)


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
        f"acceptance is a {type(acceptance).__name__}; expected a probability such as 0.8, a rate for each draft "
        "position such as [0.9, 0.7], an acceptance model, or its file"
    )


def _draft_tokens(
    token: npt.NDArray[np.int32], match_len: npt.NDArray[np.uint8], depth: int, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """Draw drafted tokens [N, D]: the output's up to match_len, then others, the same after the same rejection."""
    total = len(token)
    # Token p + j after a rejection at p is the output's token shifted by an offset that depends on p.
    shift = rng.integers(1, VOCABULARY - 1, size=total, dtype=np.int32)
    drafted = np.empty((total, depth), dtype=np.int32)
    start = np.arange(total)
    rejected = np.minimum(start + match_len, total - 1)
    for i in range(depth):
        truth = token[np.minimum(start + i, total - 1)]
        wrong = (truth - 1 + shift[rejected]) % (VOCABULARY - 1) + 1
        drafted[:, i] = np.where(i < match_len, truth, wrong)
    return drafted


def as_document(model: AcceptanceModel, fitted_to: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON document of a model, with a description of its data (`sources.describe`)."""
    return {
        "kind": KIND,
        "version": VERSION,
        "model": model.name,
        "parameters": dict(vars(model)),
        "fitted_to": fitted_to or {},
    }


def save_model(model: AcceptanceModel, path: Path | str, fitted_to: dict[str, Any] | None = None) -> None:
    """Write a model as JSON."""
    write_json(as_document(model, fitted_to), path, indent=2)


def load_model(path: str | PathLike[str]) -> AcceptanceModel:
    """Read a model; InputError for any other file."""
    path = Path(path)
    make = "make a model with `specsim acceptance fit`"
    document = read_json(path, str(path), missing=make, invalid=AGAIN)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(f"{path} is not an acceptance model; write a model with `specsim acceptance fit`")
    if document.get("version") != VERSION:
        raise InputError(f"{path} has version {document.get('version')}, this program reads {VERSION}; fit it again")
    name = document.get("model")
    if not isinstance(name, str) or name not in MODELS:
        raise InputError(f"{path}: unknown acceptance model {name!r}; known: {', '.join(MODELS)}")
    hints = get_type_hints(MODELS[name])
    known = TypedDict("known", hints)  # type: ignore[misc]
    parameters = checked(document.get("parameters"), f"{path}: parameters of the model {name}", known, invalid=AGAIN)
    model: AcceptanceModel = MODELS[name](**_tuples({key: parameters[key] for key in hints}))
    return model


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
