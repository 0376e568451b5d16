"""The diagnosis of `specsim doctor`, its page, and the rows of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specsim.replaying.document import Document
from specsim.replaying.intervals import Estimate
from specsim.replaying.result import Result as TabularResult
from specsim.report.page import Result, facts, heading, macros

if TYPE_CHECKING:
    import pandas as pd

KIND = "specsim-doctor"
LEVELS = [
    "at once",
    "speedup [95 % interval]",
    "acceptance length (tau)",
    "of a round, in decode steps",
    "K to set [90 %]",
    "then",
    "ms per token",
    "tok/s",
]


class Server(Document, frozen=True):
    """A server, as `specsim.servers.document.ServerFacts` has it."""

    url: str
    engine: str
    version: str
    model: str
    draft_tokens: int | None
    method: str
    settings: dict[str, Any]


class Trap(Document, frozen=True, omit_defaults=False):
    """A way to measure wrongly that this benchmark shows signs of.

    name : short
    evidence : the numbers that show it
    remedy : what to change
    invalid : whether the comparison means nothing; else it is a remark
    """

    name: str
    evidence: str
    remedy: str
    invalid: bool = True


class Cause(Document, frozen=True):
    """Why the server is slower than it could be.

    gain : speed without it over the speed now, with a 90 % credible interval
    evidence, remedy : numbers that show it, and what to try
    """

    name: str
    gain: Estimate
    evidence: str
    remedy: str


class Level(Document, frozen=True):
    """What was measured at a concurrency, and the draft length that would be best.

    token_ms, tokens_per_s : now; baseline_ms : without speculation
    speedup, null : of the server over its baseline, and of the baseline over its repeat
    parts : seconds of a decoding step, in baseline decode steps: verification, drafting, fixed part, and prompts of
        others; their sum is tokens_per_round / speedup
    k, k_range : recommended draft length, 0 for none, with a 90 % credible interval
    predicted : speedup at that length; predicted_ms, predicted_tokens_per_s : what it means
    flags : of the engine
    """

    concurrency: int
    token_ms: float
    baseline_ms: float
    tokens_per_s: float
    speedup: Estimate
    null: Estimate | None
    tokens_per_round: float
    parts: dict[str, float]
    k: int
    k_range: tuple[int, int]
    predicted: Estimate
    predicted_ms: float
    predicted_tokens_per_s: float
    flags: str


class Checkup(Document, TabularResult, frozen=True, tag_field="kind", tag=KIND):
    """The diagnosis of a server; `cost` is a cost file of its rounds.

    acceptance : rate of every position, if all before it were accepted
    causes : at most three, the first costs most; none on a healthy server
    """

    server: Server | None
    traps: tuple[Trap, ...]
    acceptance: tuple[float, ...]
    levels: tuple[Level, ...]
    causes: tuple[Cause, ...]
    schedule: str
    cost: dict[str, Any] | None
    notes: tuple[str, ...]
    verdict: str

    def __repr__(self) -> str:
        return self.verdict

    def to_frame(self) -> pd.DataFrame:
        """A row for every concurrency."""
        import pandas as pd  # slow to import

        return pd.DataFrame([level.as_cells() for level in self.levels])


def server_facts(server: Server) -> dict[str, str | int | None]:
    """Engine, version and settings by name."""
    names = ("engine", "version", "model", "draft_tokens", "method")
    return {name.replace("_", " "): getattr(server, name) for name in names if getattr(server, name)} | server.settings


def level_rows(levels: Sequence[Level]) -> list[list[str]]:
    """Rows of what was measured and is predicted at every concurrency."""
    return [
        [
            str(level.concurrency),
            str(level.speedup),
            f"{level.tokens_per_round:.2f}",
            ", ".join(f"{name} {value:.2f}" for name, value in level.parts.items()),
            f"{level.k or 'off'} [{level.k_range[0]}, {level.k_range[1]}]",
            str(level.predicted),
            f"{level.baseline_ms:.2f} without, {level.token_ms:.2f} now, {level.predicted_ms:.2f} then",
            f"{level.tokens_per_s:.1f} now, {level.predicted_tokens_per_s:.1f} then",
        ]
        for level in levels
    ]


def doctor_result(checkup: Checkup) -> Result:
    """The page of a diagnosis."""
    body = []
    for title, fixes in (("Traps of the benchmark", checkup.traps), ("Causes, the first costs most", checkup.causes)):
        if fixes:
            body += [heading(title), facts((fix.name, f"{fix.evidence}. Try: {fix.remedy}") for fix in fixes)]
    if checkup.levels:
        body += [heading("Where time goes, and the K to set"), _table(LEVELS, level_rows(checkup.levels))]
        flags = {f"{level.concurrency} at once": level.flags for level in checkup.levels}
        body += [facts(({**flags, "one schedule": checkup.schedule} if checkup.schedule else flags).items())]
    if checkup.acceptance:
        rates = [[str(place), f"{100 * rate:.0f} %"] for place, rate in enumerate(checkup.acceptance, start=1)]
        body += [heading("Acceptance"), _table(["draft position", "accepted, if all before were"], rates)]
    title = "a benchmark"
    if checkup.server is not None:
        title = f"{checkup.server.engine} at {checkup.server.url}"
        body += [heading("Server"), facts(server_facts(checkup.server).items())]
    return Result("Diagnosis of speculative decoding", title, checkup.verdict, body, checkup.notes)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    return macros().table("", head, [("", row) for row in rows])
