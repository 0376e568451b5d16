"""Speculation in batches, predicted for servers and really decoded: `python -m studies batches`.

Takes the acceptance of the lab's traces to servers, whose costs are published constants and rooflines, and decodes the
lab itself in batches, beside what is predicted for it. A second start goes on with what is there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import recorded_trace
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from specsim.cli.console import progress_bar
from specsim.io.progress import Progress
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.batches import real
from studies.batches.report import report
from studies.batches.servers import server_maps
from studies.common import Config, claim

RECORDED = ("config.json", "traces/*/*", "real/trace/*", f"real/{real.MEASURED}")


def traces(out: Path, config: Config, seed: int, progress: Progress) -> dict[str, Trace]:
    """The lab's, by way of decoding; recorded where they are not there."""
    asked, recorded = config["traces"], {}
    for run in asked["runs"]:
        folder = out / "traces" / run["name"]
        if not folder.is_dir():
            pair = load_pair(
                asked["target"], dtype=config["dtype"], threads=config["threads"], drafter=asked["drafter"]
            )
            prompts = study_prompts(pair.tokenizer, asked["prompts"])
            sampler = Sampler(run["mode"], run["temperature"], seed=seed)
            settings = RecordSettings(asked["depth"], asked["max_new_tokens"], sampler)
            recorded_trace(pair, prompts, settings, folder, partial(progress, f"record {run['name']}"))
        recorded[run["name"]] = read_trace(folder)
    return recorded


def main(out: Path, config: Config) -> None:
    """Run what is not there, and write the report."""
    claim(out, config)
    settings, seed = config["real"], config["seed"]
    with progress_bar() as progress:
        recorded = traces(out, config, seed, progress)
        if not (out / "real" / real.MEASURED).is_file():
            pair = load_pair(settings["target"], dtype=config["dtype"], threads=config["threads"], drafter="model")
            real.measure(out / "real", pair, settings, seed, progress)
        maps = server_maps(recorded, config["servers"], seed, progress)
    report(config, maps, *real.results(out / "real", settings)).write(out)
