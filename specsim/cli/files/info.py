"""`specsim policies`, `info`: what there is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

from specsim.cli.command import Answer
from specsim.cli.console import print_facts, print_table
from specsim.cli.options import POLICY_FILE_HELP, TraceSettings
from specsim.io.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(Settings):
    """Which policies are listed beside the built-in ones."""

    policy_file: list[str] = setting([], POLICY_FILE_HELP, metavar="FILE.py")


def policies(options: PoliciesOptions) -> Answer:
    """List policies and their settings.

    Commands that take a policy accept these names, and your own FILE.py.
    """
    from specsim.policy.registry import NAMED, find_policies

    kinds = find_policies([*NAMED, *options.policy_file])
    document = {
        name: {
            "source": kind.source,
            "settings": {field.name: _described(field) for field in dataclasses.fields(kind)},
        }
        for name, kind in kinds.items()
    }

    def show() -> None:
        for name, kind in kinds.items():
            rows = [setting_texts(field) for field in dataclasses.fields(kind)]
            print_table(f"{name}: {kind.source}", ["setting", "default", "legal", "search", "meaning"], rows)

    return Answer(document, show)


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


def info(options: TraceSettings) -> Answer:
    """Show what a trace holds.

    Shows the pair, decoding, sizes, agreement and repetition.
    """
    import numpy as np

    from specsim.trace.files import read_trace

    trace = read_trace(options.trace)
    document = {
        **{key: value for key, value in trace.meta.items() if key not in ("checksums", "provenance")},
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "domains": {str(domain): int((trace.domain == domain).sum()) for domain in np.unique(trace.domain)},
        "mean_match_len": float(trace.match_len.mean()),
    }
    return Answer(document, partial(print_facts, f"trace {options.trace}", document))
