"""`specsim claims`: keep a speedup as a regression test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import OverwriteFileOption, check_new, parse_settings, print_json, print_table, progress_bar
from specsim.cli.options import JsonOption

claims = typer.Typer(
    help="Claims about speculation in TOML files: check them again, write them, compare two runs.",
    no_args_is_help=True,
)
Files = Annotated[
    list[Path],
    typer.Argument(help="Claim files, or folders with *.claims.toml.", metavar="FILE...", show_default=False),
]


@claims.command()
def check(
    files: Files,
    junit: Annotated[Path | None, typer.Option(help="File for JUnit XML.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="File for the JSON that --json prints.", show_default=False)] = None,
    benchmark_json: Annotated[
        Path | None,
        typer.Option(help="File for seconds per token in pytest-benchmark's form.", show_default=False),
    ] = None,
    allow_policy_files: Annotated[
        bool, typer.Option("--allow-policy-files", help="Let claims run policy files outside the working tree.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Evaluate claims again and judge them.

    A claim "holds" where all that its value may be lies inside what is claimed; is "drifted" (an expected value) or
    "contradicted" (a bound, an order) where it lies outside; and is "not decidable" where the interval straddles the
    bound, which is never a pass. Exits 1 unless every claim has the verdict that it is known to have.

    A claim whose policy is a FILE.py runs that file, which is a Python program: check claims of people whom you trust.
    Files outside the working tree (Git's, or else the current folder) are run with --allow-policy-files only.

    Example: specsim claims check claims/ --junit claims.xml
    """
    from specsim.claims.check import check_files
    from specsim.claims.files import claim_files
    from specsim.claims.reports import as_document, benchmark_document, junit_xml
    from specsim.files import write_json, write_text

    paths = claim_files(files)
    with progress_bar() as progress:
        checked = check_files(paths, allow_policy_files=allow_policy_files, progress=progress)
    document = as_document(checked)
    if junit is not None:
        write_text(junit, junit_xml(checked))
    if out is not None:
        write_json(document, out)
    if benchmark_json is not None:
        write_json(benchmark_document(checked), benchmark_json)
    if json:
        print_json(document)
    else:
        rows = [[one.claim.name, one.claim.claimed, one.recomputed, _verdict(one)] for one in checked]
        passed = sum(one.passed for one in checked)
        print_table(f"{passed} of {len(checked)} claims pass", ["claim", "claimed", "recomputed", "verdict"], rows)
    if not document["passed"]:
        raise typer.Exit(1)


def _verdict(one: Any) -> str:
    known = one.claim.statement.verdict
    if one.passed:
        return one.verdict if known == "holds" else f"{one.verdict}, as known"
    return one.verdict.upper() if known == "holds" else f"{one.verdict.upper()}, known as {known}"


@claims.command()
def record(
    out: Annotated[Path, typer.Argument(help="Claim file to write, NAME.claims.toml.", show_default=False)],
    source: Annotated[
        Path,
        typer.Argument(
            help="A validation, leaderboard.json, a file of `speckernels bench` or pytest-benchmark, or a trace.",
            show_default=False,
        ),
    ],
    cost: Annotated[
        Path | None, typer.Option(help="Of a trace: its cost file, or a name that ships.", show_default=False)
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Of a trace: the policy.", show_default=False)] = None,
    set_: Annotated[
        list[str], typer.Option("--set", help="A setting, NAME=VALUE; repeat for more.", metavar="NAME=VALUE")
    ] = [],  # noqa: B006 (typer reads the default, it is never changed)
    quantity: Annotated[str, typer.Option(help="Of a trace: what to claim.")] = "speedup",
    tolerance_percent: Annotated[
        float | None,
        typer.Option(help="Default: 0.1 of replays, 3 of measured speedups, 20 of single times.", min=0),
    ] = None,
    overwrite: OverwriteFileOption = False,
) -> None:
    """Write claims from what was found: every speedup of a validation, row of a board, time of a benchmark.

    Paths are written relative to the claim file. The claims hold at once; change what you would rather claim.

    Example: specsim claims record speedups.claims.toml validation/
    """
    from specsim.claims.files import SUFFIX, write_claims
    from specsim.claims.record import document_claims, replay_claim
    from specsim.errors import InputError
    from specsim.examples import is_example

    if not out.name.endswith(SUFFIX):
        raise InputError(f"{out}: a claim file is called NAME{SUFFIX}; rename it")
    check_new(out, overwrite=overwrite)
    home = out.parent
    if is_example(source) or (source / "meta.json").is_file() or source.suffix == ".zip":
        if cost is None or policy is None:
            raise InputError("a claim of a trace needs --cost and --policy; give both")
        settings = parse_settings(set_)
        entries = [replay_claim(source, cost, policy, settings, quantity, home, tolerance_percent=tolerance_percent)]
    else:
        if cost is not None or policy is not None or set_:
            raise InputError(f"--cost, --policy and --set belong to a trace, {source} is none; leave them out")
        entries = document_claims(source, home, tolerance_percent=tolerance_percent)
    write_claims(out, entries, title=f"Written from {source.name} by `specsim claims record`.")
    print(f"{out}: {len(entries)} claims")


@claims.command()
def diff(
    old: Annotated[Path, typer.Argument(help="Before: a validation, or a benchmark's file.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="After: the same, made again.", show_default=False)],
    between_runs_percent: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of a speedup between runs of one commit, default 1.7; of a benchmark's times, the "
            "least gap that counts, default 5.",
            min=0,
            show_default=False,
        ),
    ] = None,
    more_old: Annotated[
        list[Path] | None, typer.Option(help="A further validation of before; may be given several times.")
    ] = None,
    more_new: Annotated[
        list[Path] | None, typer.Option(help="A further validation of after; may be given several times.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare two measurements of the same things: did this commit slow speculation down?

    Validations are compared in pairs of sequences, row by row with the same settings; a change counts where it is
    significant (95 %, all rows together, runs of one commit varying as given) and beyond the noise floor of both.
    Several runs a side find smaller changes.
    Files of `speckernels bench` and of pytest-benchmark are compared by median and spread. Exits 1 where a row is
    slower.

    Example: specsim claims diff before/ after/
    """
    from specsim.claims.diff import read_diff

    found = read_diff(
        old, new, more_old=more_old or (), more_new=more_new or (), between_runs_percent=between_runs_percent
    )
    if json:
        print_json(found.as_dict())
    else:
        rows = [
            [
                line.name,
                *("" if value is None else f"{value:.4g}" for value in (line.old, line.new)),
                "" if line.ratio is None else str(line.ratio),
                f"{line.change}: {line.note}" if line.note else line.change,
            ]
            for line in found.lines
        ]
        title = f"{found.quantity}, noise floor {found.floor_percent:.2f} %; new over old, below 1 is slower"
        print_table(title, ["row", "old", "new", "new over old", "verdict"], rows)
    if found.slower:
        raise typer.Exit(1)
