"""Read cost files: profiles, files that a person wrote, and shipped costs by name.

A person writes ``{"kind": "specsim-cost", "version": 1, "form": ..., "source": ..., "date": ...}`` and, by form:

constant : ``s_d``, ``s_t``, as papers print them; ``round_s``, overhead of a round; ``token_s``, time of each verified
    token beyond the pending token
linear : ``target`` and ``drafter``, each with ``fixed_s``, ``token_s``, ``cached_token_s``; ``step_s``, ``round_s``.
    ``drafter`` is charged once per drafted token, ``proposal`` (``fixed_s``, ``cached_token_s``) once per round that
    drafts. ``method`` is the drafter's kind, such as eagle3. ``fitted`` gives the range of the fit: ``{"batches": [1,
    64], "draft_tokens": [2, 7]}``, smallest and largest, without ``draft_tokens`` if unknown
roofline : ``target``, ``drafter``, ``hardware``, ..., see `specsim.cost.roofline.document`

All in seconds; missing numbers are 0. The constant form is read without the first keys, too: ``{"s_d": ..., "s_t":
...}``, with ``round_s`` and ``token_s`` if known, and a ``note``. Measured pass times are a form of their own, see
`specsim.cost.pass_times`: ``{"pass_ms": {"1": 8.5, "2": 13.5, "5": 20.7}, "draft_ms": 1.2}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from specsim.cost.batch_profile import (
    BATCH_PROFILE_KIND,
    BATCH_PROFILE_VERSION,
    BatchProfileCost,
    batch_profile_from_json,
)
from specsim.cost.joined import JOINED_COST_KIND, JoinedCost
from specsim.cost.linear import Fitted, LinearCost, LinearPass, Proposal
from specsim.cost.model import ConstantCost, CostModel, not_a_cost
from specsim.cost.pass_times import pass_times_from_json
from specsim.cost.probe import PROBE_KIND
from specsim.cost.profile import GRID_KIND, PROFILE_KIND, PROFILE_VERSION, profile_from_json
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.document import RooflineForm
from specsim.io.errors import InputError
from specsim.io.examples import located
from specsim.io.json import checked, from_keys, plain_json, read_json

KIND, VERSION = "specsim-cost", 1
SHIPPED = Path(__file__).parent / "shipped"
INVALID = "correct it, or see `specsim cost list` for files to start from"
MAKE = "make a profile with `realrun profile`, or choose one of `specsim cost list` or `specsim example --list`"
MAPPING = "(a mapping)"
CostLike = CostModel | str | PathLike[str] | Mapping[str, Any]  # as every function takes costs


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
    method: str = ""

    def cost(self, name: str) -> CostModel:
        target, drafter = (
            from_keys(getattr(self, part), LinearPass, f"{name}: {part}", INVALID) for part in ("target", "drafter")
        )
        proposal = None if self.proposal is None else from_keys(self.proposal, Proposal, f"{name}: proposal", INVALID)
        fitted = None if self.fitted is None else _fitted(from_keys(self.fitted, Ranges, f"{name}: fitted", INVALID))
        batch = fitted.batches[0] if fitted else 1
        times = target, drafter, self.step_s, self.round_s
        return LinearCost(*times, batch=batch, proposal=proposal, fitted=fitted, method=self.method)


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
        # A mapping has no file name to report: a command may have built it from its options.
        plain = where == MAPPING or str(error).startswith(name)
        raise InputError(str(error) if plain else f"{name}: {error}") from None


class JoinedDocument(TypedDict):
    """A file with the costs of several drafters, each as in its own file."""

    version: Literal[1]
    costs: list[Any]


def read_cost(cost: str | PathLike[str] | Mapping[str, Any], *, batch: int | None = None) -> CostModel:
    """Read the costs of a machine.

    Parameters
    ----------
    cost : str, Path or mapping
        A profile made by `realrun profile`; a file that you wrote (see `specsim.cost.files`), such as
        {"s_d": seconds, "s_t": seconds}; the costs of several drafters, as `specsim join` writes them; or a name of
        `specsim cost list` or `specsim example --list`. A mapping is read like a file.
    batch : int, optional
        Sequences in lockstep, for batch-aware costs.

    Returns
    -------
    CostModel
        Seconds per call.

    Raises
    ------
    InputError
        For a missing file, a file without costs, and a batch for costs without batches.
    TypeError
        For anything but a path, a name or a mapping.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, section 3.4 (costs as s_d and s_t, whose ratio is its c).

    Examples
    --------
    >>> import specsim
    >>> specsim.read_cost({"s_d": 0.001, "s_t": 0.010})
    ConstantCost(s_d=0.001, s_t=0.01)
    >>> specsim.read_cost("vllm-llama3.1-8b-eagle-h100")
    LinearCost: decoding step 7.07 ms, draft step 0.74 ms at 1,000 cached tokens
    >>> round(float(specsim.read_cost("example:llama-3.1-8b-eagle-h100").autoregressive_step(1000)), 3)
    0.006
    """
    if isinstance(cost, Mapping):
        where, document = MAPPING, plain_json(cost, "cost file (a mapping)", invalid=MAKE)
    elif isinstance(cost, str | PathLike):
        where = str(cost_path(cost))
        document = read_cost_document(Path(where))
    else:
        raise not_a_cost(cost)
    model = _cost_of(document, where)
    if batch is None:
        return model
    try:
        return with_batch(model, batch)
    except InputError as error:
        raise InputError(f"cost file {where if isinstance(cost, Mapping) else cost}: {error}") from None


def as_cost(cost: object) -> CostModel:
    """Return a cost model, or read it from a path, a name or a mapping; TypeError for anything else."""
    if isinstance(cost, CostModel):
        return cost
    if isinstance(cost, str | PathLike | Mapping):
        return read_cost(cost)
    raise not_a_cost(cost)


def with_batch(cost: CostModel, batch: int) -> CostModel:
    """The costs of `batch` sequences in lockstep; InputError for costs without batches."""
    if not isinstance(cost, LinearCost | RooflineCost | BatchProfileCost):
        raise InputError("has no batches; give linear or roofline costs, or grids with --draft-cost")
    return replace(cost, batch=batch)


def cost_path(path: str | PathLike[str]) -> Path:
    """The file at this path, or the shipped file of this name."""
    path = located(path, "cost")
    return path if path.exists() else shipped_costs().get(str(path), path)


def read_cost_document(path: Path) -> Any:
    """The parsed JSON of a cost file, unchecked."""
    return read_json(path, f"cost file {path}", missing=MAKE, invalid="make it again")


def _cost_of(data: Any, path: str) -> CostModel:
    """The cost model of a parsed cost file."""
    name = f"cost file {path}"
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == KIND:
        return cost_of_document(data, path)
    if kind == JOINED_COST_KIND:
        parts = checked(data, name, JoinedDocument, invalid="join the costs again")["costs"]
        if any(isinstance(part, dict) and part.get("kind") == JOINED_COST_KIND for part in parts) or not parts:
            raise InputError(f"{name} does not hold the costs of single drafters; join them again")
        return JoinedCost(tuple(_cost_of(part, f"{path}, drafter {n}") for n, part in enumerate(parts, start=1)))
    if kind == PROFILE_KIND:
        if data.get("version") != PROFILE_VERSION:
            raise InputError(
                f"{name} has version {data.get('version')}, this program reads {PROFILE_VERSION}; profile again"
            )
        profile = profile_from_json(data, path)
        profile.check(f"cost profile {path}")
        return profile
    if kind == BATCH_PROFILE_KIND:
        if data.get("version") != BATCH_PROFILE_VERSION:
            raise InputError(
                f"{name} has version {data.get('version')}, this program reads {BATCH_PROFILE_VERSION}; measure again"
            )
        batches = batch_profile_from_json(data, path)
        batches.check(f"batch profile {path}", data.get("noise_floor") or 0.0)
        return batches
    if isinstance(data, dict) and "pass_ms" in data:
        return pass_times_from_json(data, name)
    if isinstance(data, dict) and set(data) >= {"s_d", "s_t"}:
        remarks = {"note", *Header.__dataclass_fields__}
        keys = {key: value for key, value in data.items() if key not in remarks}
        in_seconds = "give s_d and s_t in seconds, and round_s and token_s if known"
        try:
            return from_keys(keys, ConstantForm, name, in_seconds).cost(name)
        except InputError as error:
            raise InputError(str(error) if str(error).startswith(name) else f"{name}: {error}; {in_seconds}") from None
    if kind == PROBE_KIND:
        raise InputError(f"{name} is a probe; rescale a profile with `specsim cost calibrate PROFILE PROBE --out FILE`")
    if kind == GRID_KIND:
        raise InputError(f"{name} is a {GRID_KIND} of the target only; name the drafter's grid with --draft-cost")
    raise InputError(f"{name} is neither a profile nor s_d and s_t; {MAKE}")
