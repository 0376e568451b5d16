"""`specsim claims`: guard a speedup with a regression check."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specsim.cli.command import Answer, command
from specsim.cli.console import check_new, parse_settings, print_table, progress_bar
from specsim.cli.options import OVERWRITE_FILE_HELP, SET_HELP
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.claims.check import Checked

claims = typer.Typer(help="Guard speedups with regression checks.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Settings):
    """Which claims are checked, and which reports are written."""

    files: list[Path] = argument("Claim files, or folders with *.claims.toml.", metavar="FILE...")
    junit: Path | None = setting(None, "Write JUnit XML to this file.")
    out: Path | None = setting(None, "Write the JSON that --json prints to this file.")
    benchmark_json: Path | None = setting(None, "Write seconds per token to this file, in pytest-benchmark's format.")
    allow_policy_files: bool = setting(
        False, "Allow claims to run policy files outside the working tree.", flag="--allow-policy-files"
    )


@command(claims)
def check(options: CheckOptions) -> Answer:
    """Check claims against a new evaluation.

    A claim "holds" if its whole interval satisfies it; it is "drifted" (an expected value) or "contradicted" (a bound,
    an order) if the interval lies outside; and it is "not decidable" if the interval straddles the bound, which never
    passes. Exits with 1 unless every claim has its known status.

    A claim whose policy is a FILE.py runs that Python file, so check only claims of people whom you trust. Files
    outside the working tree (Git's, or else the current folder) need --allow-policy-files.

    Example: specsim claims check claims/ --junit claims.xml
    """
    from specsim.claims.check import as_document, benchmark_document, check_files, junit_xml
    from specsim.claims.files import claim_files
    from specsim.io.files import write_json, write_text

    paths = claim_files(options.files)
    with progress_bar() as progress:
        checked = check_files(paths, allow_policy_files=options.allow_policy_files, progress=progress)
    document = as_document(checked)
    if options.junit is not None:
        write_text(options.junit, junit_xml(checked))
    if options.out is not None:
        write_json(document, options.out)
    if options.benchmark_json is not None:
        write_json(benchmark_document(checked), options.benchmark_json)
    rows = [[result.claim.name, result.claim.claimed, result.recomputed, _verdict(result)] for result in checked]
    title = f"{sum(result.passed for result in checked)} of {len(checked)} claims pass"
    show = partial(print_table, title, ["claim", "claimed", "recomputed", "verdict"], rows)
    return Answer(document, show, bool(document["passed"]))


def _verdict(result: Checked) -> str:
    known, verdict = result.claim.statement.verdict, result.verdict
    if result.passed:
        return verdict if known == "holds" else f"{verdict}, as known"
    return verdict.upper() if known == "holds" else f"{verdict.upper()}, known as {known}"


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Settings):
    """Which claims are written, from which result."""

    out: Path = argument("Claim file to write, NAME.claims.toml.")
    source: Path = argument("A validation, leaderboard.json, a file of pytest-benchmark, or a trace.")
    cost: Path | None = setting(None, "For a trace: cost file, or a name of `specsim cost list`.")
    policy: str | None = setting(None, "For a trace: policy to replay.")
    set_: list[str] = setting([], SET_HELP, metavar="NAME=VALUE")
    quantity: str = setting("speedup", "For a trace: metric to claim (default: speedup).")
    tolerance_percent: float | None = setting(
        None, "Tolerance (default: 0.1 for replays, 3 for measured speedups, 20 for single times).", low=0
    )
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


@command(claims)
def record(options: RecordOptions) -> None:
    """Write claims from a result.

    Writes a claim for every speedup of a validation, row of a leaderboard or time of a benchmark. Paths are relative
    to the claim file. The claims hold at once; edit them as you like.

    Example: specsim claims record speedups.claims.toml validation/
    """
    from specsim.claims.files import SUFFIX, write_claims
    from specsim.claims.record import document_claims, replay_claim
    from specsim.io.errors import InputError
    from specsim.io.examples import is_example

    out, source, cost, policy = options.out, options.source, options.cost, options.policy
    if not out.name.endswith(SUFFIX):
        raise InputError(f"{out}: a claim file is called NAME{SUFFIX}; rename it")
    check_new(out, overwrite=options.overwrite)
    tolerance = options.tolerance_percent
    if is_example(source) or (source / "meta.json").is_file() or source.suffix == ".zip":
        if cost is None or policy is None:
            raise InputError("a claim of a trace needs --cost and --policy; give both")
        chosen = source, cost, policy, parse_settings(options.set_), options.quantity
        entries = [replay_claim(*chosen, out.parent, tolerance_percent=tolerance)]
    else:
        if cost is not None or policy is not None or options.set_:
            raise InputError(f"--cost, --policy and --set belong to a trace, which {source} is not; leave them out")
        entries = document_claims(source, out.parent, tolerance_percent=tolerance)
    write_claims(out, entries, title=f"Written from {source.name} by `specsim claims record`.")
    print(f"{out}: {len(entries)} claims")
