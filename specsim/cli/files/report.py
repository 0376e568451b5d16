"""`specsim report`: result files of any kind as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsim.cli.console import OverwriteFileOption, check_new, print_json
from specsim.cli.options import JsonOption


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Results as JSON, or folders of a run that wrote one.", metavar="FILE...", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    overwrite: OverwriteFileOption = False,
    json: JsonOption = False,
) -> None:
    """Show results as one HTML page: validations, leaderboards, tunings, claims, batches, hardware, the papers' audit.

    Each begins with its verdict. The page is one file that needs no network: tables sort by the column that is
    pressed, figures show the value under the pointer, and it prints.

    Example: specsim tune TRACE --policy adaedl --cost COST --json > tuned.json; specsim report tuned.json validation/
    """
    from specsim.files import check_writable, write_text
    from specsim.report.results.together import render_files

    check_new(out, overwrite=overwrite)
    check_writable(out)
    write_text(out, render_files(files))
    if json:
        print_json({"report": str(out), "results": [str(path) for path in files]})
    else:
        print(f"{out}: {len(files)} {'result' if len(files) == 1 else 'results'}")
