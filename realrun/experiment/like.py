"""Another validation's settings: what it tuned, on which prompts, and how it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import torch

from realrun.experiment.settings import Candidate, Tuned, ValidationSettings
from realrun.experiment.timing import check_repeats
from realrun.measure.again import prompts_of, settings_of
from realrun.pairs.prompts import Prompt, prompt_digest
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.io.json import read_json
from specsim.policy.base import build_policy
from specsim.policy.registry import POLICIES, find_policies
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace

AGAIN = "validate anew, without --like"


class OldOptions(TypedDict):
    """How it tuned and measured."""

    trials: int
    repeats: int
    tuning_share: float
    seed: int


class OldRow(TypedDict):
    """A policy as it was tuned."""

    policy: str
    params: dict[str, Any]
    role: str
    train_speedup: NotRequired[float | None]


class OldPrompts(TypedDict):
    """Which prompts it decoded."""

    digest: str


class OldEnvironment(TypedDict):
    """Where it ran."""

    threads: int


class OldDocument(TypedDict):
    """What is read of its validation.json."""

    kind: Literal["specsim-validation"]
    rows: list[OldRow]
    options: OldOptions
    prompts: OldPrompts
    environment: OldEnvironment


@dataclass(frozen=True)
class Like:
    """A finished validation, to be done again on the same prompts with what it tuned.

    settings : its own, with `tuned` in place of tuning
    threads : that it used
    """

    folder: Path
    trace: Trace
    prompts: list[Prompt]
    settings: ValidationSettings
    threads: int

    def prepare(self, out: Path) -> None:
        """Copy its trace into the new folder, unless it lies elsewhere; InputError if it cannot be repeated."""
        if out.resolve() == self.folder.resolve():
            raise InputError(f"{out} holds the validation to repeat; choose another folder with --out")
        if (threads := torch.get_num_threads()) != self.threads:
            raise InputError(
                f"{self.folder} was measured with {self.threads} threads, this would be with {threads}; give --threads "
                f"{self.threads}"
            )
        if self.settings.trace is None and not (out / "trace").exists():
            write_trace(self.trace, out / "trace")


def read_like(folder: Path, *, trace: Path | None = None, files: Sequence[str] = ()) -> Like:
    """What the validation in this folder did; InputError where its files do not say.

    trace : where its trace lies, unless in the folder
    files : FILE.py of policies of the user's own among its rows
    """
    path = folder / "validation.json"
    finished = "give the folder of a finished validation"
    document: OldDocument = read_json(path, str(path), OldDocument, missing=finished, invalid=AGAIN)
    if not document["rows"]:
        raise InputError(f"{path} has no rows; {AGAIN}")
    profile = folder / "profile.json"
    measured: dict[str, Any] = read_json(profile, str(profile), dict[str, Any], missing=finished, invalid=AGAIN)
    cost = profile_from_json(measured, str(profile))
    if trace is None and not (folder / "trace").is_dir():
        raise InputError(f"{folder} holds no trace, since it was made with --trace; name the same trace by --trace")
    where = trace or folder / "trace"
    recorded = read_trace(where)
    prompts = prompts_of(recorded, str(where))
    if prompt_digest(prompts) != document["prompts"]["digest"]:
        raise InputError(f"{where} is of other prompts than {path}; name its own trace by --trace")
    kinds = find_policies([*POLICIES, *files])
    candidates = []
    for row in document["rows"]:
        name = row["policy"]
        if name not in kinds:
            raise InputError(f"{path}: policy {name!r} is unknown; name its file by --policy-file")
        try:
            policy = build_policy(kinds[name], row["params"])
            candidates.append(Candidate(policy, row["role"], row.get("train_speedup")))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    try:
        check_repeats(document["options"]["repeats"])
    except InputError:
        repeats = document["options"]["repeats"]
        raise InputError(f"{path} was measured with {repeats} repeats, which have no median run; {AGAIN}") from None
    settings = ValidationSettings(
        record=settings_of(recorded, str(where)),
        kinds=tuple(dict.fromkeys(type(candidate.policy) for candidate in candidates)),
        **document["options"],
        trace=trace,
        tuned=Tuned(tuple(candidates), cost, measured),
    )
    return Like(folder, recorded, prompts, settings, document["environment"]["threads"])
