"""AdaEDL at temperatures, with greedy and with sampled drafts: `python -m studies adaedl`.

Records EAGLE at each temperature of config.toml in both modes of drafting, compares AdaEDL's score with the acceptance
probability that it should bound, and replays the paper's policies on held-out prompts. A second start goes on with what
is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import EagleKind
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.train.eagle import feature_pass
from specsim.acceptance.formulas import adaedl_score, leviathan_speedup
from specsim.cli.console import progress_bar
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.arrays import FloatArray, Floats, IntArray, Ints
from specsim.io.files import replacing
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.intervals import (
    Comparison,
    Estimate,
    against_baseline,
    interval_text,
    paired_difference,
    ratio_interval,
    resample,
    tails,
)
from specsim.replaying.priced import PricedTrace
from specsim.report.drawing import DOT, INK, MUTED, styled, svg
from specsim.report.table import Column, plain
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from studies.common import (
    DRAFTS,
    Config,
    Document,
    about_prompts,
    about_smollm2_costs,
    cached,
    claim,
    load,
    parts,
    prompts_of,
    recorded,
    smollm2_costs,
)
from studies.comparisons import difference_text, sign_text
from studies.figures import COLORS
from studies.report import Report, machine_line

MEASURED, PAPER = "measured costs", "paper's s_d / s_t"
LONGEST, FIXED, CONFIDENT = "Base-SPD, longest draft", "fixed K, tuned", "Max-Confidence"
ADAEDL, TUNED = "AdaEDL, paper's gamma", "AdaEDL, gamma tuned"
IN_WORDS = {LONGEST: "Base-SPD with the longest draft", FIXED: "the tuned fixed K", CONFIDENT: "Max-Confidence"}
ASKED = ((ADAEDL, LONGEST), (ADAEDL, FIXED), (ADAEDL, CONFIDENT), (TUNED, ADAEDL))
LESS = "AdaEDL less fixed K"
BINS = 10
TENTHS = plain(lambda value: f"{value['estimate']:.1f} [{value['low']:.1f}, {value['high']:.1f}]")
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


@dataclass(frozen=True)
class Cell:
    """A temperature and a mode of drafting.

    tuning, held : signals of the tuning and of the held-out prompts
    boards : replayed policies by cost
    """

    temperature: float
    mode: str
    tuning: Signals
    held: Signals
    boards: Mapping[str, Document]

    def difference(self, cost: str, a: str, b: str) -> Comparison:
        """Return the speedup of policy a minus that of policy b."""
        board = self.boards[cost]
        seconds = {row["label"]: row["seconds"] for row in board["rows"]}
        return paired_difference(board["baseline_s"], seconds[a], seconds[b])

    def verdict(self, cost: str, a: str, b: str) -> str:
        """Return whether policy a is significantly faster or slower than policy b."""
        return sign_text(self.difference(cost, a, b).difference)

    def against_baseline(self, cost: str, label: str) -> str:
        """Return whether a policy is significantly faster or slower than no speculation."""
        speedup = ratio_interval(self.boards[cost]["baseline_s"], self.policy(cost, label)["seconds"])
        return against_baseline(speedup)

    def row(self, config: Config) -> dict[str, Any]:
        """Return the cell's row of table.csv."""
        score, confidence = correlations(self.held)
        bounding = bounding_gamma(self.tuning, config["bounded_share"])
        return {
            "temperature": self.temperature,
            "drafts": DRAFTS[self.mode],
            "entropy_nats": float(self.held.entropy_nats.mean()),
            "acceptance_probability": float(self.held.acceptance.mean()),
            "score_correlation": score.as_dict(),
            "confidence_correlation": confidence.as_dict(),
            "violated_percent_paper": violated(self.held, config["gamma"]).as_dict(),
            "gamma_bounding": bounding,
            "violated_percent_bounding": violated(self.held, bounding).as_dict(),
            **{
                name: value
                for cost, board in self.boards.items()
                for policy in board["rows"]
                for name, value in (
                    (
                        f"speedup, {policy['label']}, {cost}",
                        ratio_interval(board["baseline_s"], policy["seconds"]).as_dict(),
                    ),
                    (f"tau, {policy['label']}, {cost}", policy["tau"]),
                )
            },
            **{f"K, {FIXED}, {cost}": self.policy(cost, FIXED)["settings"]["k"] for cost in self.boards},
        }

    def policy(self, cost: str, label: str) -> Document:
        """Return a row of the board at these costs."""
        return next(row for row in self.boards[cost]["rows"] if row["label"] == label)


def report(config: Config, document: Document, cells: Sequence[Cell]) -> Report:
    """Return the report. document : where it ran, and the load while costs were measured"""
    rows = [cell.row(config) for cell in cells]
    sizes = {part: len(document["rows"][0][part]) for part in ("tuning", "holdout")}
    ratio, _ = paper_ratio(**config["table1"])
    toy, sampled = config["toy"], [cell for cell in cells if cell.mode == "rejection"]
    broken = any(violated(cell.held, config["gamma"]).estimate for cell in sampled)
    held = [row["violated_percent_bounding"]["estimate"] for row in rows]
    gammas = [row["gamma_bounding"] for row in rows]
    return Report(
        question="Is AdaEDL's score a lower bound of the acceptance probability?",
        answer=f"{'No' if broken else 'Yes'}: on SmolLM2 with EAGLE the score with the paper's gamma = "
        f"{config['gamma']:g} exceeds it {exceeded(cells, 'rejection', config)} of the positions with sampled drafts, "
        "which the paper's bound is about, and "
        f"{exceeded(cells, 'greedy-draft', config)} with greedy drafts, as engines draft by default. "
        f"{counts(cells, MEASURED)}",
        figure=against_entropy(cells, config),
        figure_name="entropy",
        caption="Acceptance probability (tenths of the positions, 10th to 90th percentile) and AdaEDL's score by "
        "entropy of the draft",
        columns=[
            Column("T", lambda row: f"{row['temperature']:g}"),
            Column("drafts", "drafts"),
            Column("score above acceptance, %", "violated_percent_paper", TENTHS),
            Column("fixed K, tuned", lambda row: f"{speed(row, FIXED)}, K = {row[f'K, {FIXED}, {MEASURED}']}"),
            Column("AdaEDL", lambda row: speed(row, ADAEDL)),
            Column(LESS, LESS),
        ],
        shown=[
            {**row, LESS: difference_text(cell.difference(MEASURED, ADAEDL, FIXED).difference, significant=True)}
            for cell, row in zip(cells, rows, strict=True)
        ],
        table=rows,
        trust=[
            f"Prompts: {about_prompts(config, {'sequences': sizes})}. Intervals (95 %) are over held-out prompts, "
            f"paired for differences. EAGLE drafts from {document['draft_vocabulary']:,} tokens.",
            "Acceptance probability: 1 - TVD of sampled drafts, and the target's probability of the drafter's "
            "likeliest token of greedy ones. Both have one output.",
            machine_line(config, document),
            f"{about_smollm2_costs(document['load'])} Replays of greedy drafts are exact, those of sampled drafts "
            "unbiased, with one outcome of every position.",
            f"Conclusions that differ (greedy / sampled drafts), at measured costs: {changes(cells, MEASURED)}.",
            f"With gamma = {min(gammas):.2f} to {max(gammas):.2f}, by temperature and drafts, the score is below "
            f"acceptance at {100 * config['bounded_share']:g} % of the tuning positions; on the held-out prompts it is "
            f"above it at {min(held):.1f} to {max(held):.1f} %. lambda_0, which the paper does not give, is tuned.",
            f"The paper's s_d / s_t, {ratio:.3f}, is fitted to its table 1. {counts(cells, PAPER)}",
            "The lab's toy models had shown, with sampled drafts, the score above the acceptance probability at "
            f"{toy['violated_percent'][0]} to {toy['violated_percent'][1]} % of the positions, and AdaEDL slower than "
            f"the tuned fixed K in {toy['slower_than_fixed_k']} of {toy['cells']} cases.",
        ],
    )


def exceeded(cells: Sequence[Cell], mode: str, config: Config) -> str:
    """Return at what share of positions the score of the paper's gamma exceeds the acceptance probability."""
    shares = [violated(cell.held, config["gamma"]).estimate for cell in cells if cell.mode == mode]
    return f"at {min(shares):.1f} to {max(shares):.1f} %"


def speed(row: Mapping[str, Any], label: str) -> str:
    """Return a policy's speedup at measured costs, and its tau."""
    return f"{interval_text(row[f'speedup, {label}, {MEASURED}'])}, tau {row[f'tau, {label}, {MEASURED}']:.2f}"


def won_and_lost(cells: Sequence[Cell], cost: str, a: str, b: str) -> tuple[int, int]:
    """Return in how many cells policy a is significantly faster than policy b, and in how many slower."""
    verdicts = [cell.verdict(cost, a, b) for cell in cells]
    return verdicts.count("faster"), verdicts.count("slower")


def counts(cells: Sequence[Cell], cost: str) -> str:
    """Return the sentence that says at how many temperatures AdaEDL is significantly faster or slower than others."""
    texts = []
    for a, b in ASKED:
        than = "with tuned gamma than with the paper's" if a == TUNED else f"than {IN_WORDS[b]}"
        numbers = (won_and_lost([cell for cell in cells if cell.mode == mode], cost, a, b) for mode in DRAFTS)
        texts.append(f"{than} at {' and '.join(f'{faster} ({slower})' for faster, slower in numbers)}")
    return (
        f"At {cost} AdaEDL is significantly faster (slower), of {len(cells) // len(DRAFTS)} temperatures with greedy "
        f"and with sampled drafts, {', '.join(texts)}."
    )


def changes(cells: Sequence[Cell], cost: str) -> str:
    """Return which conclusions on AdaEDL differ between greedy and sampled drafts."""
    greedy, sampled = ([cell for cell in cells if cell.mode == mode] for mode in DRAFTS)
    texts = []
    for pair in zip(greedy, sampled, strict=True):
        findings = {
            "AdaEDL against no speculation": [cell.against_baseline(cost, ADAEDL) for cell in pair],
            **{
                "tuned against the paper's gamma" if a == TUNED else f"AdaEDL against {IN_WORDS[b]}": [
                    cell.verdict(cost, a, b) for cell in pair
                ]
                for a, b in ASKED
            },
            "the fixed K chosen": [str(cell.policy(cost, FIXED)["settings"]["k"]) for cell in pair],
        }
        texts += [
            f"{what} at T = {pair[0].temperature:g} ({of_greedy} / {of_sampled})"
            for what, (of_greedy, of_sampled) in findings.items()
            if of_greedy != of_sampled
        ]
    return "; ".join(texts) or "none"


@styled()
def against_entropy(cells: Sequence[Cell], config: Config) -> str:
    """Draw acceptance by entropy of the draft, in tenths of the positions, and the score of the paper's gamma."""
    figure = Figure(figsize=(8.2, 3.8), layout="constrained")
    panels = figure.subplots(1, len(DRAFTS), sharey=True)
    grid = np.linspace(0, max(np.quantile(cell.held.entropy_nats, 0.95) for cell in cells), 200)
    for axes, (mode, drafts) in zip(panels, DRAFTS.items(), strict=True):
        for cell, color in zip([cell for cell in cells if cell.mode == mode], COLORS, strict=False):
            tenths = np.array_split(np.argsort(cell.held.entropy_nats, kind="stable"), BINS)
            x = np.array([cell.held.entropy_nats[rows].mean() for rows in tenths])
            y = np.array([cell.held.acceptance[rows].mean() for rows in tenths])
            ends = np.array([np.quantile(cell.held.acceptance[rows], [0.1, 0.9]) for rows in tenths]).T
            axes.errorbar(x, y, yerr=np.maximum([y - ends[0], ends[1] - y], 0), fmt="none", ecolor=color, alpha=0.6)
            axes.plot(x, y, "o-", color=color, markersize=4.5, label=f"T = {cell.temperature:g}", **DOT)
        axes.plot(grid, adaedl_score(grid, config["gamma"]), color=INK, label=f"score, gamma = {config['gamma']:g}")
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.set_title(f"{drafts} drafts")
        axes.set_xlabel("entropy of the draft, nats")
    panels[0].set_ylabel("acceptance probability")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return svg(figure, "entropy", "Acceptance probability and AdaEDL's score against the entropy of the draft")


@dataclass(frozen=True)
class Signals:
    """Every position [N] of the outputs, after the text before it.

    sequence : int, the prompt's index
    entropy_nats, confidence : of the distribution of the first drafted token
    acceptance : how likely that token is accepted; 1 - TVD(draft, target) where the drafter samples it
    """

    sequence: IntArray
    entropy_nats: FloatArray
    confidence: FloatArray
    acceptance: FloatArray

    def of(self, sequences: IntArray) -> Signals:
        """The positions of these prompts."""
        rows = np.isin(self.sequence, sequences)
        return Signals(*(getattr(self, field.name)[rows] for field in fields(self)))


def bounding_gamma(signals: Signals, share: float) -> float:
    """Find the smallest gamma at which AdaEDL's score is a lower bound of acceptance at this share of positions."""
    squared = (1 - signals.acceptance) ** 2
    needed = np.divide(squared, signals.entropy_nats, out=np.full(len(squared), np.inf), where=signals.entropy_nats > 0)
    return float(np.quantile(needed, share, method="higher"))


def _summed(values: npt.ArrayLike, signals: Signals) -> Floats:
    """Sums per prompt that has positions."""
    _, which = np.unique(signals.sequence, return_inverse=True)
    return np.bincount(which, weights=np.asarray(values, dtype=np.float64)).astype(np.float64)


def violated(signals: Signals, gamma: float) -> Estimate:
    """Share of positions where the score exceeds the acceptance probability, in percent; its interval over prompts."""
    above = adaedl_score(signals.entropy_nats, gamma) > signals.acceptance
    return ratio_interval(_summed(100.0 * above, signals), _summed(np.ones(len(above)), signals))


def correlations(signals: Signals, *, repeats: int = 2000) -> tuple[Estimate, Estimate]:
    """Pearson's correlation with the acceptance probability, of the score and of confidence; intervals over prompts.

    That of the score is the same for every gamma, as the score is linear in sqrt(H).
    """
    prompts = len(np.unique(signals.sequence))
    index = np.concatenate([np.arange(prompts)[None], resample(prompts, repeats=repeats)])
    estimates = []
    for column in (-np.sqrt(signals.entropy_nats), signals.confidence):
        values = _pearson(column, signals.acceptance, signals, index)
        low, high = np.quantile(values[1:], tails(prompts, 0.95))
        estimates.append(Estimate(float(values[0]), float(low), float(high)))
    return estimates[0], estimates[1]


def _pearson(x: FloatArray, y: FloatArray, signals: Signals, index: Ints) -> Floats:
    """The correlation over each choice of prompts, index [R, S]."""
    n, sx, sy, sxx, syy, sxy = (
        _summed(values, signals)[index].sum(axis=1) for values in (np.ones(len(x)), x, y, x * x, y * y, x * y)
    )
    return np.asarray((n * sxy - sx * sy) / np.sqrt((n * sxx - sx**2) * (n * syy - sy**2)))


def paper_ratio(autoregressive: Sequence[float], base_spd: Mapping[str, Sequence[float]]) -> tuple[float, Floats]:
    """s_d / s_t, and the acceptance of each data set, that explain the paper's rates of fixed draft lengths best.

    By independent acceptance (Leviathan et al. 2023, Theorem 3.8), in least squares of log speedups.

    autoregressive : tokens/s by data set; base_spd : the same by draft length
    """
    from scipy.optimize import least_squares

    lengths = np.array([[int(length)] for length in base_spd])
    speedups = np.array(list(base_spd.values())) / np.array(autoregressive)

    def misfit(x: Floats) -> Floats:
        return np.log(leviathan_speedup(x[1:], lengths, x[0]) / speedups).ravel()

    start = np.array([0.05, *[0.6] * speedups.shape[1]])
    found = least_squares(misfit, start, bounds=(1e-6, 1 - 1e-6)).x
    return float(found[0]), found[1:]
