"""Validate predictions on the embedded lab: `python -m studies.lab.run [OUT]`.

Writes one folder per run and `summary.md`, in which every number comes from the runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realrun.pairs.prompts import lab_prompts
from specsim.cli.console import progress_bar
from specsim.report.documents import VALIDATION_COLUMNS
from specsim.report.markdown import ladder_table, markdown_table, trust_table
from specsim.report.table import as_text
from studies.common import Config, about_machine, claim, run_study, validation


def summary(documents: dict[str, dict[str, Any]]) -> str:
    """The study's report as Markdown."""
    lines = ["# Predicted against measured speedup on the lab", ""]
    for name, document in documents.items():
        lines += [
            f"## {name}",
            "",
            f"{document['sequences']['holdout']} hold-out prompts, {document['output_tokens']} tokens, "
            f"{about_machine(document)}. First drafted token accepted "
            f"{document['first_token_accepted_share']:.3f}, distinct trigrams "
            f"{document['distinct_trigram_share']:.3f}.",
            "",
            *markdown_table(*as_text(VALIDATION_COLUMNS, document["rows"])),
            *trust_table({name: document}),
            *ladder_table((row["label"], row) for row in document["rows"]),
        ]
    return "\n".join(lines)


def main(out: Path, config: Config) -> None:
    """Run every configured run and write the summary."""
    claim(out, config)
    documents = {}
    with progress_bar() as report:
        for run in config["runs"]:
            folder = out / run["name"]
            documents[run["name"]] = validation(folder, "model", None, run, config, report, prompts=lab_prompts)
    (out / "summary.md").write_text(summary(documents))


if __name__ == "__main__":
    run_study(main, __file__)
