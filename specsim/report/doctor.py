"""The page of `specsim doctor`, and the rows of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.replaying.intervals import interval_text
from specsim.report.page import Result, facts, heading, macros

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


def server_facts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Engine, version and settings by name."""
    server = document["server"]
    names = ("engine", "version", "model", "draft_tokens", "method")
    return {name.replace("_", " "): server[name] for name in names if server[name]} | server["settings"]


def level_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Rows of what was measured and is predicted at every concurrency."""
    return [
        [
            str(level["concurrency"]),
            interval_text(level["speedup"]),
            f"{level['tokens_per_round']:.2f}",
            ", ".join(f"{name} {value:.2f}" for name, value in level["parts"].items()),
            f"{level['k'] or 'off'} [{level['k_range'][0]}, {level['k_range'][1]}]",
            interval_text(level["predicted"]),
            f"{level['baseline_ms']:.2f} without, {level['token_ms']:.2f} now, {level['predicted_ms']:.2f} then",
            f"{level['tokens_per_s']:.1f} now, {level['predicted_tokens_per_s']:.1f} then",
        ]
        for level in document["levels"]
    ]


def fix_rows(document: Mapping[str, Any], key: str) -> list[list[str]]:
    """Rows of traps or causes: name, evidence, remedy."""
    return [[fix["name"], fix["evidence"], fix["remedy"]] for fix in document[key]]


def doctor_result(document: Mapping[str, Any]) -> Result:
    """The page of a diagnosis, of the document of `specsim doctor --json`."""
    body = []
    for title, key in (("Traps of the benchmark", "traps"), ("Causes, the first costs most", "causes")):
        if document[key]:
            fixes = ((name, f"{evidence}. Try: {remedy}") for name, evidence, remedy in fix_rows(document, key))
            body += [heading(title), facts(fixes)]
    if document["levels"]:
        body += [heading("Where time goes, and the K to set"), _table(LEVELS, level_rows(document))]
        flags = {f"{level['concurrency']} at once": level["flags"] for level in document["levels"]}
        body += [facts(({**flags, "one schedule": document["schedule"]} if document["schedule"] else flags).items())]
    if document["acceptance"]:
        rates = [[str(place), f"{100 * rate:.0f} %"] for place, rate in enumerate(document["acceptance"], start=1)]
        body += [heading("Acceptance"), _table(["draft position", "accepted, if all before were"], rates)]
    title = "a benchmark"
    if document["server"]:
        title = f"{document['server']['engine']} at {document['server']['url']}"
        body += [heading("Server"), facts(server_facts(document).items())]
    return Result("Diagnosis of speculative decoding", title, document["verdict"], body, document["notes"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    return macros().table("", head, [("", row) for row in rows])
