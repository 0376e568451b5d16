"""Validate predictions on the embedded lab: `python studies/lab/run.py [OUT]`.

Writes one folder per run and `summary.md`, in which every number comes from the runs.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from realrun.recording.record import RecordSettings
from realrun.validation.run import ValidationSettings, validate
from specsim.cli.console import progress_bar
from specsim.files import write_text
from specsim.speedup.intervals import interval_text

HERE = Path(__file__).parent


def summary(documents: dict[str, dict[str, Any]]) -> str:
    """The study's report as Markdown."""
    lines = ["# Predicted against measured speedup on the lab", ""]
    for name, document in documents.items():
        environment = document["environment"]
        lines += [
            f"## {name}",
            "",
            f"{document['sequences']['holdout']} hold-out prompts, {document['output_tokens']} tokens, "
            f"{environment['device']}, {environment['threads']} thread, {document['dtype']}, "
            f"{environment['date'][:10]}. First drafted token accepted "
            f"{document['first_token_accepted_share']:.3f}, distinct trigrams "
            f"{document['distinct_trigram_share']:.3f}.",
            "",
            "| policy | settings | predicted | measured | error % | rounds identical % |",
            "|---|---|---|---|---|---|",
        ]
        for row in document["rows"]:
            predicted, measured = (interval_text(v) for v in (row["predicted"], row["measured"]))
            lines.append(
                f"| {row['label']} | {row['role']} | {predicted} | {measured} | {row['error_percent']:+.1f} "
                f"| {row['rounds_identical_percent']:.2f} |"
            )
        lines += [
            "",
            f"Median absolute error {document['median_abs_error_percent']:.2f} %. The predicted best policy is "
            f"{document['best']['loss_percent']:.2f} % below the measured best.",
            "",
        ]
    return "\n".join(lines)


def main(out: Path) -> None:
    """Run every configured run and write the summary."""
    config = tomllib.loads((HERE / "config.toml").read_text())
    pair = load_pair(dtype=config["dtype"], threads=config["threads"])
    prompts = lab_prompts(pair.tokenizer, config["prompts"])
    documents = {}
    for run in config["runs"]:
        sampler = Sampler(run["mode"], run["temperature"], config["seed"])
        settings = ValidationSettings(
            record=RecordSettings(config["depth"], config["max_new_tokens"], sampler),
            trials=config["trials"],
            repeats=config["repeats"],
            seed=config["seed"],
        )
        with progress_bar() as report:
            documents[run["name"]] = validate(pair, prompts, settings, out / run["name"], report)
    write_text(out / "summary.md", summary(documents))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "out")
