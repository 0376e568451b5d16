"""Where speculation pays on mixtures of experts: `python -m studies experts`.

Renders recorded figures alone: what passes of mixtures and of a dense model take at every batch, as NVIDIA's package
aiconfigurator-core interpolates it between measured operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specsim.io.json import read_json
from studies.common import Config, claim
from studies.experts.report import report

MEASURED = "experts.json"
RECORDED = ("config.json", MEASURED)


def main(out: Path, config: Config) -> None:
    """Write the report."""
    claim(out, config)
    path = out / MEASURED
    again = "run the study without --real, on its recorded figures"
    report(config, read_json(path, str(path), dict[str, Any], missing=again, invalid=again)).write(out)
