"""Speculation in batches, predicted for servers and really decoded: `python -m studies batches`.

Takes the acceptance of SmolLM2 with EAGLE to servers, whose costs are published constants and rooflines, and decodes
the lab in batches, to hold the prediction of batches against real ones. A second start goes on with what is there.
"""

from __future__ import annotations

from pathlib import Path

from realrun.pairs.pair import load_pair
from specsim.cli.console import progress_bar
from specsim.trace.files import read_plain_trace
from studies.batches import real
from studies.batches.report import report
from studies.batches.servers import server_maps
from studies.common import Config, claim

RECORDED = ("config.json", "real/trace/*", f"real/{real.MEASURED}")


def main(out: Path, config: Config) -> None:
    """Run what is not there, and write the report."""
    claim(out, config)
    settings, seed = config["real"], config["seed"]
    trace = read_plain_trace(f"example:{config['servers']['trace']}")
    with progress_bar() as progress:
        if not (out / "real" / real.MEASURED).is_file():
            pair = load_pair(settings["target"], dtype=config["dtype"], threads=config["threads"], drafter="model")
            real.measure(out / "real", pair, settings, seed, progress)
        maps = server_maps(trace, config["servers"], seed, progress)
    report(config, maps, *real.results(out / "real", settings)).write(out)
