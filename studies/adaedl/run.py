"""AdaEDL under rejection sampling: `python -m studies adaedl`.

Trains a second, smaller draft model as the lab's was trained, records both by rejection sampling at each temperature of
config.toml, compares AdaEDL's score with the acceptance probability that it should bound, and replays the paper's
policies on held-out prompts. A second start goes on with what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from realrun.decode.sampling import Sampler, describe
from realrun.drafters.independent import IndependentKind
from realrun.lab.train import TrainSettings, export, train
from realrun.pairs.lab_drafters import LAB_WEIGHTS
from realrun.pairs.pair import LAB, Pair, load_pair
from realrun.pairs.prompts import Prompt, study_prompts
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
from studies.adaedl.report import (
    ADAEDL,
    CONFIDENT,
    FIXED,
    LAB_DRAFT,
    LONGEST,
    MEASURED,
    PAPER,
    SMALL,
    TUNED,
    Cell,
    report,
)
from studies.common import Config, Document, cached, claim, middle_too, named, parts, profiled, recorded

FOLDERS = {LAB_DRAFT: "lab", SMALL: "small"}
FOUND, SIGNALS = "found.json", "signals.npz"
RECORDED = ("config.json", FOUND, f"*/*/{SIGNALS}")


def small_draft(out: Path, config: Config) -> Path:
    """The second draft model: on text first, then on the target's distributions. A killed training goes on."""
    done, work, target = out / "draft", out / "training", LAB_WEIGHTS / "target"
    if not done.is_dir():
        AutoTokenizer.from_pretrained(target).save_pretrained(work / "tokenizer")
        text, distilled, size = (config["small"][key] for key in ("text_tokens", "distill_tokens", "size"))
        settings = TrainSettings("draft", text + distilled, size, distill_after_tokens=text, seed=config["seed"])
        train(settings, work, target)
        export(work, "draft", work / "exported", size)
        (work / "exported" / "draft").rename(done)
    return done


def load_pairs(out: Path, config: Config) -> dict[str, Pair]:
    """The target with each draft model."""
    drafts = {LAB_DRAFT: LAB, SMALL: str(small_draft(out / FOLDERS[SMALL], config))}
    options = {"dtype": config["dtype"], "threads": config["threads"], "predictor": None}
    return {name: load_pair(config["target"], draft, **options) for name, draft in drafts.items()}


@torch.inference_mode()
def signals_of(pair: Pair, trace: Trace, prompts: list[Prompt]) -> Signals:
    """Signals of the drafter and acceptance probability, at every position of the recorded outputs."""
    sampler = Sampler(**trace.meta["decoding"])
    target, drafter = pair.core.target, pair.drafter
    assert isinstance(drafter, IndependentKind)
    columns: list[torch.Tensor] = []
    for prompt, begin, end in zip(prompts, trace.offsets[:-1], trace.offsets[1:], strict=True):
        text = torch.tensor([[*prompt.tokens, *trace.token[begin : end - 1].tolist()]])
        wanted, drafted = (
            sampler.probs(model(input_ids=text, use_cache=False).logits[0, len(prompt.tokens) - 1 :]).double()
            for model in (target, drafter.model)
        )
        shown = describe(drafted, drafted.argmax(-1))
        columns.append(torch.stack([shown[:, 3], shown[:, 2], torch.minimum(wanted, drafted).sum(-1)]))
    sequence = np.repeat(np.arange(trace.sequences), trace.output_tokens)
    return Signals(sequence, *torch.cat(columns, dim=1).numpy())


def save_signals(done: Path, pair: Pair, trace: Trace, config: Config) -> None:
    """The signals of this trace into this file, unless they are there."""
    if not done.is_file():
        signals = signals_of(pair, trace, study_prompts(pair.tokenizer, config["prompts"]))
        with replacing(done) as file, file.open("wb") as handle:
            np.savez_compressed(handle, **{field.name: getattr(signals, field.name) for field in fields(signals)})


def read_signals(done: Path) -> Signals:
    """The signals in this file."""
    with np.load(done) as columns:
        return Signals(**columns)


def drafted_acceptance(trace: Trace) -> float:
    """Mean acceptance probability, as recorded, of the first token of every draft."""
    assert trace.accept_prob is not None
    return float(trace.accept_prob[:, 0].mean())


def policies(train: PricedTrace, config: Config) -> Iterator[tuple[str, Policy]]:
    """The paper's policies, each with what is tuned on these prompts."""
    depth = train.trace.depth

    def best(kind: type[Policy], **fixed: object) -> Policy:
        return best_policy(
            kind, train, SearchSettings(trials=config["trials"], seed=config["seed"], jobs=1, fixed=fixed)
        )

    yield LONGEST, FixedK(depth)
    yield FIXED, best(FixedK)
    yield CONFIDENT, best(MaxConfidence)
    yield ADAEDL, best(AdaEDL, gamma=config["gamma"])
    yield TUNED, best(AdaEDL)


def speedups(done: Path, trace: Trace, cost: CostModel, config: Config) -> Document:
    """Every policy on the held-out prompts; read from its file if it was written before."""

    def replayed() -> Document:
        train, held = (PricedTrace(part, cost) for part in parts(trace, config))
        rows = []
        for label, policy in policies(train, config):
            played = held.replay(policy, seed=config["seed"])
            baseline_s = played.autoregressive_s
            rows.append({"label": label, "settings": policy.settings, "seconds": played.speculative_s.tolist()})
        ratio = held.table().step_ratio
        return {"rows": rows, "baseline_s": baseline_s.tolist(), "step_ratio": ratio, "draws": played.draws}

    return cached(done, replayed)


def find(out: Path, config: Config) -> Document:
    """Return all that the report shows but the signals, which lie in files of their own."""
    pairs = load_pairs(out, config)
    rows: Document = {}
    profile: dict[str, CostModel] = {}
    ratio, _ = paper_ratio(**config["table1"])
    with progress_bar() as progress_of_all:
        for (name, pair), run in product(pairs.items(), config["runs"]):
            home = out / FOLDERS[name]
            folder = home / run["name"]
            progress = named(progress_of_all, run["name"])
            trace = recorded(folder / "trace", pair, run, config, progress)
            if name not in profile:  # shared by all temperatures, so that they are compared at the same costs
                file = home / "profile.json"
                profile[name] = profiled(file, lambda pair=pair: pair, trace, progress, contexts=middle_too(trace))  # type: ignore[misc]
            save_signals(folder / SIGNALS, pair, trace, config)
            costs: dict[str, CostModel] = {MEASURED: profile[name], PAPER: ConstantCost(ratio * 1e-2, 1e-2)}
            boards = {
                cost: speedups(folder / f"{cost.replace(' ', '-')}.json", trace, model, config)
                for cost, model in costs.items()
            }
            tuning, held = split_sequences(trace, tuning_share=config["tuning_share"], seed=config["seed"])
            rows.setdefault(name, {})[run["name"]] = {
                "temperature": trace.meta["decoding"]["temperature"],
                "tuning": tuning.tolist(),
                "held": held.tolist(),
                "drafted": drafted_acceptance(trace.select(held)),
                "boards": boards,
            }
    parameters = {
        name: sum(p.numel() for p in pair.drafter.weights(pair.target)[0].parameters()) for name, pair in pairs.items()
    }
    ran = {"environment": trace.meta["provenance"], "dtype": trace.meta["dtype"]}
    return {**ran, "parameters": parameters, "rows": rows}


def main(out: Path, config: Config) -> None:
    """Run what is not there yet and write the report."""
    claim(out, config)
    document = cached(out / FOUND, lambda: find(out, config))
    cells = []
    for name, runs in document["rows"].items():
        for run, row in runs.items():
            signals = read_signals(out / FOLDERS[name] / run / SIGNALS)
            tuning, held = (signals.of(np.array(row[part])) for part in ("tuning", "held"))
            cells.append(Cell(name, row["temperature"], row["drafted"], tuning, held, row["boards"]))
    report(config, document, cells).write(out)
