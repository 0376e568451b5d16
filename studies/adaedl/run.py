"""AdaEDL at temperatures, with greedy and with sampled drafts: `python -m studies adaedl`.

Records EAGLE at each temperature of config.toml in both modes of drafting, compares AdaEDL's score with the acceptance
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
    DRAFTS,
    Config,
    Document,
    cached,
    claim,
    load,
    parts,
    prompts_of,
    recorded,
    smollm2_costs,
)

FOUND, SIGNALS = "found.json", "signals.npz"
RECORDED = ("config.json", FOUND, f"*/*/{SIGNALS}")


@torch.inference_mode()
def signals_of(pair: Pair, trace: Trace, prompts: Sequence[Prompt]) -> dict[str, Signals]:
    """Return the signals of EAGLE's first drafted token, as recorded, and its acceptance by plain passes; by mode.

    For every position of the recorded outputs. Of the target's p and EAGLE's q, a sampled draft is accepted with the
    sum of min(p, q), which is 1 - TVD, and a greedy one with p of q's likeliest token.
    """
    sampler, target = Sampler(**trace.meta["decoding"]), pair.target
    assert isinstance(pair.drafter, EagleKind)
    eagle, head = pair.drafter.eagle, target.get_output_embeddings()
    acceptance: dict[str, list[torch.Tensor]] = {mode: [] for mode in DRAFTS}
    for number, begin, end in zip(trace.sequence_id, trace.offsets[:-1], trace.offsets[1:], strict=True):
        prompt = prompts[number]
        text = torch.tensor([[*prompt.tokens, *trace.token[begin : end - 1].tolist()]])
        features = target.model(input_ids=text, use_cache=False).last_hidden_state
        wanted, drafted = (
            sampler.probs(own(states[0, len(prompt.tokens) - 1 :])).double()
            for own, states in ((head, features), (eagle.head(head), feature_pass(eagle, target, text, features)))
        )
        acceptance["greedy-draft"].append(wanted.gather(-1, drafted.argmax(-1, keepdim=True))[:, 0])
        acceptance["rejection"].append(torch.minimum(wanted, drafted).sum(-1))
    sequence = np.repeat(np.arange(trace.sequences, dtype=np.int16), trace.output_tokens)
    seen = (sequence, trace.entropy_nats[:, 0], trace.confidence[:, 0])
    return {mode: Signals(*seen, torch.cat(values).float().numpy()) for mode, values in acceptance.items()}


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
        rows.append(
            {
                "label": label,
                "settings": policy.settings,
                "seconds": played.speculative_s.tolist(),
                "tau": float(played.output_tokens.sum() / played.num_rounds.sum()),
            }
        )
    return {"rows": rows, "baseline_s": played.autoregressive_s.tolist()}


def find(out: Path, config: Config) -> Document:
    """Return all that the report shows but the signals, which lie in files of their own."""
    pair = load(config, config["drafter"])
    ratio, _ = paper_ratio(**config["table1"])
    measured, source = smollm2_costs()
    costs: dict[str, CostModel] = {MEASURED: measured, PAPER: ConstantCost(ratio * 1e-2, 1e-2)}
    rows = []
    with progress_bar() as progress:
        for run in config["runs"]:
            traces = recorded(out / run["name"], pair, run, config, progress)
            signals = signals_of(pair, next(iter(traces.values())), prompts_of(pair, config))
            for mode, trace in traces.items():
                name = f"{run['name']}/{mode}"
                save_signals(out / name / SIGNALS, signals[mode])
                tuning, held = split_sequences(trace, tuning_share=config["tuning_share"], seed=config["seed"])
                rows.append(
                    {
                        "name": name,
                        "temperature": run["temperature"],
                        "mode": mode,
                        "tuning": tuning.tolist(),
                        "holdout": held.tolist(),
                        "boards": {label: speedups(trace, cost, config) for label, cost in costs.items()},
                    }
                )
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
    for row in document["rows"]:
        signals = read_signals(out / row["name"] / SIGNALS)
        tuning, held = (signals.of(np.array(row[part])) for part in ("tuning", "holdout"))
        cells.append(Cell(row["temperature"], row["mode"], tuning, held, row["boards"]))
    report(config, document, cells).write(out)
