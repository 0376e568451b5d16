"""`specsim report`: result files of any kind as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specsim.cli.command import Answer
from specsim.cli.console import claim_file
from specsim.cli.options import OVERWRITE_FILE_HELP
from specsim.io.settings import Settings, argument, setting


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Settings):
    """Which results are shown, and where."""

    files: list[Path] = argument("Results as JSON, or output folders of runs.", metavar="FILE...")
    out: Path = setting(Path("report.html"), "The page to write.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def report(options: ReportOptions) -> Answer:
    """Show results as one HTML page.

    Takes validations, leaderboards, tunings, claims, batches and hardware comparisons. Each begins with its verdict.
    The page is one file that needs no network: click a column to sort a table, hover a figure to see values.

    Example: specsim tune TRACE --policy adaedl --cost COST --json > tuned.json; specsim report tuned.json validation/
    """
    from specsim.io.files import write_text
    from specsim.report.files import render_files

    files, out = options.files, options.out
    claim_file(out, overwrite=options.overwrite)
    write_text(out, render_files(files))
    show = partial(print, f"{out}: {len(files)} {'result' if len(files) == 1 else 'results'}")
    return Answer({"report": str(out), "results": [str(path) for path in files]}, show)
