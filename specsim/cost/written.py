"""Cost files that a person can write, and those that ship under a name.

``{"kind": "specsim-cost", "version": 1, "form": ..., "source": ..., "date": ...}`` and, by form:

constant : ``s_d``, ``s_t``, as papers print them; ``round_s``, what a round takes beside its passes; ``token_s``, what
    a verified token takes beside the pending one
linear : ``target`` and ``drafter``, each with ``fixed_s``, ``token_s``, ``cached_token_s``; ``step_s``, ``round_s``. In
    place of ``token_s``, or by sequences, a curve: ``"tokens": {"at": [...], "seconds": [...]}``, as of
    `specsim cost fit`. ``drafter`` is charged once per drafted token, ``proposal`` (``fixed_s``, ``cached_token_s``)
    once per round that drafts. ``fitted`` says what the numbers come from: ``{"batches": [1, 64], "draft_tokens":
    [2, 7]}``, each the smallest and the largest, without ``draft_tokens`` where the source does not tell them
roofline : ``target``, ``drafter``, ``hardware``, ..., see `specsim.cost.roofline.document`
silicon : the same by operators that NVIDIA measured, see `specsim.cost.silicon.cost`

All in seconds. What is left out is 0. ``{"s_d": ..., "s_t": ...}`` alone is read, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from specsim.cost.linear import BatchPass, Fitted, LinearCost, LinearPass, Proposal
from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.roofline.document import NESTED, RooflineDocument, roofline_from_document
from specsim.cost.silicon.cost import SiliconDocument, silicon_from_document
from specsim.cost.step_times import CurveDocument, step_time
from specsim.errors import InputError
from specsim.json_files import checked, read_json

KIND, VERSION = "specsim-cost", 1
SHIPPED = Path(__file__).parent / "shipped"
INVALID = "mend it, or see `specsim cost list` for files to start from"


class Written(TypedDict):
    """What every form has."""

    kind: Literal["specsim-cost"]
    form: Literal["constant", "linear", "roofline", "silicon"]
    source: str
    date: str


class Constant(TypedDict):
    """The papers' numbers."""

    s_d: float
    s_t: float
    round_s: NotRequired[float]
    token_s: NotRequired[float]


class Pass(TypedDict):
    """One model's passes."""

    fixed_s: float
    token_s: NotRequired[float]
    cached_token_s: NotRequired[float]
    sequences: NotRequired[CurveDocument]
    tokens: NotRequired[CurveDocument]


class ProposalDocument(TypedDict):
    """What drafting takes once a round."""

    fixed_s: float
    cached_token_s: NotRequired[float]


class FittedDocument(TypedDict):
    """What costs were fitted to."""

    batches: list[int]
    draft_tokens: NotRequired[list[int]]


class Linear(TypedDict):
    """Passes that take longer by the token."""

    target: Pass
    drafter: Pass
    proposal: NotRequired[ProposalDocument]
    fitted: NotRequired[FittedDocument]
    step_s: NotRequired[float]
    round_s: NotRequired[float]


FORMS: dict[str, Any] = {"constant": Constant, "linear": Linear, "roofline": RooflineDocument,
                         "silicon": SiliconDocument}  # fmt: skip


def shipped_costs() -> dict[str, Path]:
    """The cost files that ship with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}


def read_written(path: Path) -> dict[str, Any]:
    """The document of a written cost file, checked."""
    document = read_json(path, f"cost file {path}", missing="check the path", invalid=INVALID)
    return check_written(document, str(path))


def check_written(document: Any, where: str) -> dict[str, Any]:
    """The document, if it is one of this kind; InputError names a key that no form has, too."""
    name = f"cost file {where}"
    checked(document, name, Written, invalid=INVALID)
    if document.get("version") != VERSION:
        raise InputError(f"{name} has version {document.get('version')}, this program reads {VERSION}; write that")
    shape = FORMS[document["form"]]
    checked(document, name, shape, invalid=INVALID)
    _refuse_others(document, {"version", *Written.__annotations__, *shape.__annotations__}, name)
    for part in ("target", "drafter") if shape is Linear else ():
        _refuse_others(document[part], set(Pass.__annotations__), f"{name}: {part}")
        for curve in {"sequences", "tokens"} & set(document[part]):
            _refuse_others(document[part][curve], set(CurveDocument.__annotations__), f"{name}: {part}: {curve}")
    for part, known in (("proposal", ProposalDocument), ("fitted", FittedDocument)) if shape is Linear else ():
        _refuse_others(document.get(part, {}), set(known.__annotations__), f"{name}: {part}")
    calibration = document.get("calibration", {})
    _refuse_others(calibration, set(NESTED), f"{name}: calibration")
    for part, found in calibration.items():
        _refuse_others(found or {}, set(NESTED[part].__annotations__), f"{name}: calibration: {part}")
    return dict(document)


def _refuse_others(document: Mapping[str, Any], known: set[str], name: str) -> None:
    for key in document:
        if key not in known:
            raise InputError(
                f"{name} has an unknown key {key!r}, which would mean nothing; known: {', '.join(sorted(known))}"
            )


def _pass(document: Mapping[str, Any]) -> BatchPass:
    return step_time(document) if {"sequences", "tokens"} & set(document) else LinearPass(**document)


def _fitted(document: FittedDocument) -> Fitted:
    found: dict[str, tuple[int, int]] = {}
    for key, ends in (("batches", document["batches"]), ("draft_tokens", document.get("draft_tokens"))):
        if ends is None:
            continue
        if len(ends) != 2 or not 1 <= ends[0] <= ends[1]:
            raise InputError(f"fitted: {key}={ends!r:.60}; give the smallest and the largest, such as [1, 64]")
        found[key] = ends[0], ends[1]
    return Fitted(**found)


def _linear(document: Mapping[str, Any]) -> LinearCost:
    target, drafter = (_pass(document[part]) for part in ("target", "drafter"))
    proposal = Proposal(**document["proposal"]) if "proposal" in document else None
    fitted = _fitted(document["fitted"]) if "fitted" in document else None
    seconds = {key: document.get(key, 0.0) for key in ("step_s", "round_s")}
    batch = fitted.batches[0] if fitted else 1
    return LinearCost(target, drafter, **seconds, batch=batch, proposal=proposal, fitted=fitted)


def written_cost(document: Mapping[str, Any], where: str) -> CostModel:
    """The cost model of a checked document."""
    try:
        if document["form"] == "roofline":
            return roofline_from_document(document)
        if document["form"] == "silicon":
            return silicon_from_document(document)
        if document["form"] == "linear":
            return _linear(document)
        s_d, s_t = document["s_d"], document["s_t"]
        token_s, round_s = document.get("token_s", 0.0), document.get("round_s", 0.0)
        if not token_s and not round_s:
            return ConstantCost(s_d, s_t)
        # The pending token's pass takes s_t.
        return LinearCost(LinearPass(s_t - token_s, token_s), LinearPass(s_d), round_s=round_s)
    except InputError as error:
        raise InputError(f"cost file {where}: {error}") from None
