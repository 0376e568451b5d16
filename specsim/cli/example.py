"""`specsim example`: a recorded trace and a measured profile, to try the commands on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsim.cli.console import print_json
from specsim.cli.options import JsonOption


def example(
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not be there yet.")] = Path("example"),
    json: JsonOption = False,
) -> None:
    """Write a trace and a profile of the lab's pair, on which replay, tune, leaderboard and tree can be tried.

    The target is the lab's with 40 layers, at temperature 0.8, the profile one thread's of a CPU.

    Example: specsim example && specsim leaderboard example/trace --cost example/profile.json
    """
    from specsim.errors import InputError
    from specsim.files import replacing_folder
    from specsim.results import SHIPPED
    from specsim.trace.files import read_trace, write_trace

    if out.exists():
        raise InputError(f"{out} exists; choose another name")
    shipped = SHIPPED / "example"
    with replacing_folder(out) as work:
        write_trace(read_trace(shipped / "trace.zip"), work / "trace")
        (work / "profile.json").write_bytes((shipped / "profile.json").read_bytes())
    trace, profile = out / "trace", out / "profile.json"
    if json:
        print_json({"trace": str(trace), "profile": str(profile)})
    else:
        print(f"try: specsim leaderboard {trace} --cost {profile}")
