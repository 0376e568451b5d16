"""EESD taken apart: its table 4 and figures 4 and 5, every early exit trained with every seed and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from realrun.decode.acceptance_predictor import FILE
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from realrun.training.predictor.data import PredictorSettings
from realrun.training.predictor.train import train_predictor
from specsim.cost.model import CostModel
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.progress import Progress
from specsim.replaying.priced import PricedTrace
from studies.common import Config, named
from studies.training.replays import Folders, Traces, by_seed, profiled
from studies.training.seeds import Seeds, harmonic_mean, share
from studies.training.tables import difference_cells, length_cells, markdown_table
from studies.training.trainings import EESD, NO_DISTILLATION, NO_EXIT

PAPER_K = 10  # of its ablation
TUNED = Variant("tuned")
FORMS: Mapping[str, tuple[str, type[Policy], Variant]] = {  # row -> (early exit, policy, form)
    "EESD, Beta-TS": (EESD, BetaTS, TUNED),
    "without early-exit layer": (NO_EXIT, BetaTS, TUNED),
    "without self-distillation": (NO_DISTILLATION, BetaTS, TUNED),
    "without TS, best K": (EESD, FixedK, TUNED),
    f"without TS, K = {PAPER_K}": (EESD, FixedK, Variant("the paper's", {"k": PAPER_K}, tuned=False)),
}
PARTS: Mapping[str, tuple[str, type[Policy], Variant]] = {
    "EESD, Cali-TS": (EESD, CaliTS, TUNED),
    # The score keeps all the weight, Eq. 6, or has none after the first round.
    "without sampling prediction": (EESD, CaliTS, Variant("without sampling prediction", {"sigma_s": 1e4})),
    "without model prediction": (EESD, CaliTS, Variant("without model prediction", {"sigma_s": 1e-6})),
}
SWEPT: Mapping[str, type[Policy]] = {"best fixed K": FixedK, "Beta-TS": BetaTS}

Rows = dict[str, Seeds]
Costs = Mapping[str, CostModel]  # by early exit


def predictors(folders: Mapping[int, Path], config: Config, report: Progress) -> None:
    """Train the predictor of every seed's early exit, for Cali-TS, beside it."""
    for seed, folder in folders.items():
        if (folder / FILE).is_file():
            continue
        pair = load_pair(
            config["target"],
            dtype=config["dtype"],
            threads=config["threads"],
            drafter=str(folder),
            predictor="none",
        )
        prompts = lab_prompts(pair.tokenizer, config["early_exits"]["predictor_prompts"], split="train")
        settings = PredictorSettings(max_draft_tokens=config["depth"], seed=seed)
        progress = named(report, f"predictor, seed {seed}")
        document = train_predictor(pair, prompts, settings, folder / "predictor", progress)
        Path(document["predictor"]).rename(folder / FILE)


def costs(out: Path, traces: Traces, folders: Folders, config: Config, report: Progress) -> dict[str, CostModel]:
    """The profile of every structure: of the first seed's drafter, used for all seeds."""
    found = {}
    for name in folders:
        like = EESD if name == NO_DISTILLATION else name
        folder, trace = (next(iter(each[like].values())) for each in (folders, traces))
        found[name] = profiled(out, folder, trace, config, report, trees=False)
    return found


def rows(forms: Mapping[str, tuple[str, type[Policy], Variant]], traces: Traces, costs: Costs, config: Config) -> Rows:
    """Each tuned on some prompts and reported on the others."""
    return {
        what: by_seed(kind, form, traces[name], costs[name], config, tuned=True)
        for what, (name, kind, form) in forms.items()
    }


def sweep(what: str, traces: Traces, costs: Costs, config: Config) -> dict[int, Rows]:
    """Figures 4 and 5: N or E -> policy -> replays."""
    layers, exit_layers = config["early_exits"]["usual"]
    key, usual = {"N": ("layers", layers), "E": ("exit_layers", exit_layers)}[what]
    names = {n: EESD if n == usual else f"{what} = {n}" for n in config["early_exits"][key]}
    return {
        n: {
            policy: by_seed(kind, TUNED, traces[name], costs[name], config, tuned=True)
            for policy, kind in SWEPT.items()
        }
        for n, name in names.items()
    }


def quality_cells(runs: Seeds) -> tuple[str, ...]:
    """v_d, r_d and HM."""
    shares = (share(runs, "accepted", over) for over in ("drafted", "tokens"))
    return (*(f"{value:.3f}" for value in shares), f"{harmonic_mean(runs):.3f}")


def rows_table(found: Rows) -> list[str]:
    """Table 4, or a part of it: each against the first."""
    whole = next(iter(found.values()))
    table = []
    for what, runs in found.items():
        against = ("", "") if runs is whole else difference_cells(runs, whole)
        table.append([what, *quality_cells(runs), *length_cells(runs), *against])
    columns = ["variant", "v_d", "r_d", "HM", "tau", "speedup", "tau less the first's", "speedup less the first's"]
    return markdown_table(columns, table)


def sweep_table(what: str, found: Mapping[int, Rows], usual: int, ratios: Mapping[int, float]) -> list[str]:
    """A sweep over N or E, each against the usual one. ratios : s_d / s_t by N or E"""
    table = []
    for n, by_policy in found.items():
        for policy, runs in by_policy.items():
            against = ("", "") if n == usual else difference_cells(runs, found[usual][policy])
            cells = (f"{harmonic_mean(runs):.3f}", f"{ratios[n]:.3f}")
            table.append([str(n), policy, *cells, *length_cells(runs), *against])
    columns = [what, "policy", "HM", "s_d / s_t", "tau", "speedup"]
    return markdown_table([*columns, f"tau less that of {usual}", f"speedup less that of {usual}"], table)


def step_ratio(traces: Traces, costs: Costs, name: str) -> float:
    """s_d / s_t of an early exit."""
    return float(PricedTrace(next(iter(traces[name].values())), costs[name]).table().step_ratio)
