"""AdaEDL under rejection sampling: `python -m studies adaedl`.

Records EAGLE by rejection sampling at each temperature of config.toml, compares AdaEDL's score with the acceptance
probability that it should bound, and replays the paper's policies on held-out prompts. A second start goes on with what
is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import EagleKind
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.train.eagle import feature_pass
from specsim.cli.console import progress_bar
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.files import replacing
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from studies.adaedl.bound import Signals, paper_ratio
from studies.adaedl.report import ADAEDL, CONFIDENT, FIXED, LONGEST, MEASURED, PAPER, TUNED, Cell, report
from studies.common import (
    Config,
    Document,
    cached,
    claim,
    load,
    named,
    parts,
    prompts_of,
    recorded,
    run_title,
    smollm2_costs,
)

FOUND, SIGNALS = "found.json", "signals.npz"
RECORDED = ("config.json", FOUND, f"*/{SIGNALS}")


@torch.inference_mode()
def signals_of(pair: Pair, trace: Trace, prompts: Sequence[Prompt]) -> Signals:
    """Return the signals of EAGLE's first drafted token, as recorded, and its acceptance probability by plain passes.

    For every position of the recorded outputs.
    """
    sampler, target = Sampler(**trace.meta["decoding"]), pair.target
    assert isinstance(pair.drafter, EagleKind)
    eagle, head, acceptance = pair.drafter.eagle, target.get_output_embeddings(), []
    for prompt, begin, end in zip(prompts, trace.offsets[:-1], trace.offsets[1:], strict=True):
        text = torch.tensor([[*prompt.tokens, *trace.token[begin : end - 1].tolist()]])
        features = target.model(input_ids=text, use_cache=False).last_hidden_state
        wanted, drafted = (
            sampler.probs(own(states[0, len(prompt.tokens) - 1 :])).double()
            for own, states in ((head, features), (eagle.head(head), feature_pass(eagle, target, text, features)))
        )
        acceptance.append(torch.minimum(wanted, drafted).sum(-1).float())
    sequence = np.repeat(np.arange(trace.sequences, dtype=np.int16), trace.output_tokens)
    return Signals(sequence, trace.entropy_nats[:, 0], trace.confidence[:, 0], torch.cat(acceptance).numpy())


def save_signals(done: Path, signals: Signals) -> None:
    """Write the signals into this file."""
    with replacing(done) as file, file.open("wb") as handle:
        np.savez_compressed(handle, **vars(signals))


def read_signals(done: Path) -> Signals:
    """Read the signals in this file."""
    with np.load(done) as columns:
        return Signals(**columns)


def policies(train: PricedTrace, config: Config) -> Iterator[tuple[str, Policy]]:
    """The paper's policies, each with what is tuned on these prompts."""

    def best(kind: type[Policy], **fixed: object) -> Policy:
        return best_policy(
            kind, train, SearchSettings(trials=config["trials"], seed=config["seed"], jobs=1, fixed=fixed)
        )

    yield LONGEST, FixedK(train.trace.depth)
    yield FIXED, best(FixedK)
    yield CONFIDENT, best(MaxConfidence)
    yield ADAEDL, best(AdaEDL, gamma=config["gamma"])
    yield TUNED, best(AdaEDL)


def speedups(trace: Trace, cost: CostModel, config: Config) -> Document:
    """Replay every policy on the held-out prompts."""
    train, held = (PricedTrace(part, cost) for part in parts(trace, config))
    rows = []
    for label, policy in policies(train, config):
        played = held.replay(policy, seed=config["seed"])
        rows.append({"label": label, "settings": policy.settings, "seconds": played.speculative_s.tolist()})
    return {"rows": rows, "baseline_s": played.autoregressive_s.tolist()}


def find(out: Path, config: Config) -> Document:
    """Return all that the report shows but the signals, which lie in files of their own."""
    pair = load(config, config["drafter"])
    ratio, _ = paper_ratio(**config["table1"])
    measured, source = smollm2_costs()
    costs: dict[str, CostModel] = {MEASURED: measured, PAPER: ConstantCost(ratio * 1e-2, 1e-2)}
    rows = {}
    with progress_bar() as progress:
        for run in config["runs"]:
            folder = out / run["name"]
            trace = recorded(folder / "trace", pair, run, config, named(progress, run_title(run)))
            save_signals(folder / SIGNALS, signals_of(pair, trace, prompts_of(pair, config)))
            tuning, held = split_sequences(trace, tuning_share=config["tuning_share"], seed=config["seed"])
            rows[run["name"]] = {
                "temperature": run["temperature"],
                "tuning": tuning.tolist(),
                "holdout": held.tolist(),
                "boards": {name: speedups(trace, cost, config) for name, cost in costs.items()},
            }
    meta = trace.meta
    return {
        "environment": meta["provenance"],
        "dtype": meta["dtype"],
        "draft_vocabulary": meta["drafter_facts"]["draft_vocabulary"],
        "load": source["load"],
        "rows": rows,
    }


def main(out: Path, config: Config) -> None:
    """Run what is not there yet and write the report."""
    claim(out, config)
    document = cached(out / FOUND, lambda: find(out, config))
    cells = []
    for run, row in document["rows"].items():
        signals = read_signals(out / run / SIGNALS)
        tuning, held = (signals.of(np.array(row[part])) for part in ("tuning", "holdout"))
        cells.append(Cell(row["temperature"], tuning, held, row["boards"]))
    report(config, document, cells).write(out)
