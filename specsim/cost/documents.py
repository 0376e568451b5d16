"""Cost files that a person can write, and the shipped ones.

``{"kind": "specsim-cost", "version": 1, "form": ..., "source": ..., "date": ...}`` and, by form:

constant : ``s_d``, ``s_t``, as papers print them; ``round_s``, overhead of a round; ``token_s``, time of each verified
    token beyond the pending token
linear : ``target`` and ``drafter``, each with ``fixed_s``, ``token_s``, ``cached_token_s``; ``step_s``, ``round_s``.
    ``drafter`` is charged once per drafted token, ``proposal`` (``fixed_s``, ``cached_token_s``) once per round that
    drafts. ``fitted`` gives the range of the fit: ``{"batches": [1, 64], "draft_tokens": [2, 7]}``, smallest and
    largest, without ``draft_tokens`` if unknown
roofline : ``target``, ``drafter``, ``hardware``, ..., see `specsim.cost.roofline.document`

All in seconds; missing numbers are 0. ``{"s_d": ..., "s_t": ...}`` alone is read, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from specsim.cost.keys import from_keys
from specsim.cost.linear import Fitted, LinearCost, LinearPass, Proposal
from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.roofline.document import RooflineForm
from specsim.io.errors import InputError
from specsim.io.json import read_json

KIND, VERSION = "specsim-cost", 1
SHIPPED = Path(__file__).parent / "shipped"
INVALID = "correct it, or see `specsim cost list` for files to start from"


@dataclass(frozen=True)
class Header:
    """Keys of every form."""

    kind: Literal["specsim-cost"]
    form: Literal["constant", "linear", "roofline"]
    source: str
    date: str
    version: Any = None


class Form(Protocol):
    """The keys of a form, which make a cost model."""

    def cost(self, name: str) -> CostModel: ...


@dataclass(frozen=True)
class ConstantForm:
    """The papers' numbers."""

    s_d: float
    s_t: float
    round_s: float = 0.0
    token_s: float = 0.0

    def cost(self, name: str) -> CostModel:
        if not self.token_s and not self.round_s:
            return ConstantCost(self.s_d, self.s_t)
        # The pending token's pass takes s_t.
        target = LinearPass(self.s_t - self.token_s, self.token_s)
        return LinearCost(target, LinearPass(self.s_d), round_s=self.round_s)


@dataclass(frozen=True)
class LinearForm:
    """Passes whose time grows with their tokens."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    proposal: dict[str, Any] | None = None
    fitted: dict[str, Any] | None = None
    step_s: float = 0.0
    round_s: float = 0.0

    def cost(self, name: str) -> CostModel:
        target, drafter = (
            from_keys(getattr(self, part), LinearPass, f"{name}: {part}", INVALID) for part in ("target", "drafter")
        )
        proposal = None if self.proposal is None else from_keys(self.proposal, Proposal, f"{name}: proposal", INVALID)
        fitted = None if self.fitted is None else _fitted(from_keys(self.fitted, Ranges, f"{name}: fitted", INVALID))
        batch = fitted.batches[0] if fitted else 1
        return LinearCost(target, drafter, self.step_s, self.round_s, batch=batch, proposal=proposal, fitted=fitted)


@dataclass(frozen=True)
class Ranges:
    """Smallest and largest batch and K to which costs were fitted."""

    batches: list[int]
    draft_tokens: list[int] | None = None


FORMS: dict[str, type[Form]] = {
    "constant": ConstantForm,
    "linear": LinearForm,
    "roofline": RooflineForm,
}


def _fitted(ranges: Ranges) -> Fitted:
    ends: dict[str, tuple[int, int]] = {}
    for key, values in vars(ranges).items():
        if values is None:
            continue
        if len(values) != 2 or not 1 <= values[0] <= values[1]:
            raise InputError(f"fitted: {key}={values!r:.60}; give the smallest and the largest, such as [1, 64]")
        ends[key] = values[0], values[1]
    return Fitted(**ends)


def shipped_costs() -> dict[str, Path]:
    """The cost files that ship with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}


def read_cost_file(path: Path) -> dict[str, Any]:
    """Read and check the document of a cost file."""
    document = read_json(path, f"cost file {path}", dict[str, Any], missing="check the path", invalid=INVALID)
    cost_of_document(document, str(path))
    return dict(document)


def cost_of_document(document: Mapping[str, Any], where: str) -> CostModel:
    """The cost model of a parsed document; InputError names unknown keys, too."""
    name = f"cost file {where}"
    header_keys = Header.__dataclass_fields__
    header = from_keys({key: value for key, value in document.items() if key in header_keys}, Header, name, INVALID)
    if header.version != VERSION:
        raise InputError(f"{name} has version {header.version}, this program reads {VERSION}; write that")
    keys = {key: value for key, value in document.items() if key not in header_keys}
    try:
        return from_keys(keys, FORMS[header.form], name, INVALID).cost(name)
    except InputError as error:
        raise InputError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
