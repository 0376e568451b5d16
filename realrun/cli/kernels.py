"""The console command `speckernels`, which names what is missing where torch is not installed."""

from __future__ import annotations

import sys

from specsim.cli.console import BAD_INPUT, is_own, missing_module


def main() -> None:
    """Entry point of the console command."""
    try:
        from speckernels.cli import main as run
    except ModuleNotFoundError as error:
        if is_own(error):
            raise
        print(missing_module(error), file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    run()
