"""Write what a page's blocks print: `python -m docs docs/tutorials/tune.md`; `--quick` leaves out the slow ones."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.pages import PageError, rewrite

if __name__ == "__main__":
    chosen = [argument for argument in sys.argv[1:] if argument != "--quick"]
    if not chosen:
        sys.exit("usage: python -m docs PAGE.md... [--quick]")
    for name in chosen:
        try:
            rewrite(Path(name), slow="--quick" not in sys.argv)
        except PageError as error:
            sys.exit(f"{name}: {error}")
