"""`specsim policies`, `info`, `data list`: what there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import print_json, print_table
from specsim.cli.options import JsonOption, PolicyFileOption, TraceArgument

data = typer.Typer(help="Results of campaigns that ship with specsim, or lie in a folder.", no_args_is_help=True)


def policies(
    policy_file: PolicyFileOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """List the policies with their settings, defaults and ranges.

    Commands that take a policy take these names, and a FILE.py of your own.
    """
    from specsim.policy.registry import NAMED, find_policies

    kinds = find_policies([*NAMED, *policy_file])
    if json:
        print_json(
            {
                name: {
                    "source": kind.source,
                    "settings": {field.name: _described(field) for field in dataclasses.fields(kind)},
                }
                for name, kind in kinds.items()
            }
        )
        return
    for name, kind in kinds.items():
        rows = [setting_texts(field) for field in dataclasses.fields(kind)]
        print_table(f"{name}: {kind.source}", ["setting", "default", "legal", "search", "meaning"], rows)


def _described(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """A setting's default, ranges and help; what it bounds is for those who cut it to a trace."""
    return {"default": field.default, **{key: value for key, value in field.metadata.items() if key != "bounds"}}


def setting_texts(field: dataclasses.Field[Any]) -> list[str]:
    """A setting's line in `policies`: name, default, legal values, search range, meaning."""
    meta, default = field.metadata, field.default
    low, high = f"{meta['low']:g}", f"{meta['high']:g}"
    shown, legal = str(default), f"{low} to {high}"
    searched = (
        f"{meta['tune'][0]:g} to {meta['tune'][1]:g}{', log' if meta['log'] else ''}" if meta["tune"] else "fixed"
    )
    if isinstance(default, (bool, str)):
        choices = meta["choices"] or ("true", "false")
        shown, legal, searched = str(default).lower(), ", ".join(choices), "all" if meta["tune"] else "fixed"
    elif isinstance(default, tuple):
        shown = ",".join(f"{number:g}" for number in default) if len(default) <= 4 else f"{len(default)} numbers"
        legal, searched = f"numbers, {low} to {high}", "learned" if not meta["tune"] else searched
    return [field.name, shown, legal, searched, meta["doc"]]


def info(trace: TraceArgument, json: JsonOption = False) -> None:
    """Show what a trace holds: the pair, decoding, sizes, agreement, repetition."""
    import numpy as np

    from specsim.trace.files import read_trace

    data = read_trace(trace)
    document = {
        **{key: value for key, value in data.meta.items() if key not in ("checksums", "provenance")},
        "sequences": data.sequences,
        "output_tokens": int(data.output_tokens.sum()),
        "domains": {str(d): int((data.domain == d).sum()) for d in np.unique(data.domain)},
        "mean_match_len": float(data.match_len.mean()),
    }
    if json:
        print_json(document)
        return
    print_table(f"trace {trace}", ["", "value"], [[key, fact_text(value)] for key, value in document.items()])


def fact_text(value: Any) -> str:
    """What meta.json says of something, to read."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {fact_text(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(fact_text, value)) or "none"
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@data.command("list")
def data_list(
    folder: Annotated[
        Path | None, typer.Option(help="A folder that `realrun campaign` wrote; default: what ships with specsim.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List campaign results: what each file holds, where and when it was measured. Reads and checks every file."""
    from specsim.results import SHIPPED, list_results

    results = list_results(folder or SHIPPED)
    columns = ("file", "kind", "device", "date", "summary")
    rows = [{name: getattr(result, name) for name in columns} for result in results]
    from_gpu = sum(result.from_gpu for result in results)
    if json:
        print_json({"results": rows, "from_gpu": from_gpu})
        return
    if rows:
        print_table("campaign results", list(columns), [list(row.values()) for row in rows])
    if not from_gpu:
        where = "there" if folder else "shipped"
        print(f"No result from a GPU is {where} yet; `realrun campaign --out DIR --minutes 30` on one makes them.")
