"""What the study computes, each into a folder of its own: early exits trained, predictors, validations.

What is there already is read, so that a second start goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from realrun.decode.acceptance_predictor import FILE, load_predictor
from realrun.drafters.self_sd import SelfSDKind
from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import LAB_WEIGHTS, load_pair
from realrun.pairs.prompts import lab_prompts, study_prompts
from realrun.training.common.distill import TextSettings
from realrun.training.common.loop import LoopSettings
from realrun.training.common.on_text import TextRun
from realrun.training.eesd import EesdSettings, train_eesd
from realrun.training.predictor.data import PredictorSettings
from realrun.training.predictor.train import train_predictor
from realrun.validation.typical_acceptance import TypicalSettings, compare_typical
from specsim.cost.model import ConstantCost
from specsim.errors import InputError
from specsim.files import write_json
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES, make_policy
from specsim.progress import Progress
from specsim.trace.files import read_trace
from studies.common import Config, Document, board, load, named, validation
from studies.words import first_best, is_deepened

CHAINS_ONLY = ("model", SelfSDKind.name)  # as the papers have them
BASE, NO_DISTILLATION = "base", "no self-distillation"
WITH_PREDICTOR = (BASE,)
PAPER_K = 10  # EESD's ablation


class PaperK(FixedK):
    """The paper's fixed draft length beside the tuned one."""

    name = "fixed_k"
    variants = (Variant("tuned"), Variant("the paper's", {"k": PAPER_K}, tuned=False))


class CaliParts(CaliTS):
    """Cali-TS whole, without sampling prediction (theta_M alone) and without model prediction (theta_hat alone)."""

    name = "cali_ts"
    variants = (
        Variant("tuned"),
        Variant("without sampling prediction", {"sigma_s": 1e4}),  # the score keeps all the weight, Eq. 6
        Variant("without model prediction", {"sigma_s": 1e-6}),  # and has none after the first round
    )


def main_jobs(out: Path, run: Config, config: Config, report: Progress) -> dict[str, Document]:
    """The validation of every drafter in one way of decoding."""
    found = {}
    if is_deepened(config) and SelfSDKind.name in config["drafters"]:
        raise InputError(f"{SelfSDKind.name} would skip the blocks of {config['target']} for free; leave it out")
    for drafter in config["drafters"]:
        names = config["chains"] if drafter in CHAINS_ONLY else [*config["chains"], *config["trees"]]
        kinds = tuple(POLICIES[name] for name in names)
        trees = drafter not in CHAINS_ONLY
        found[drafter] = validation(out / run["name"] / drafter, drafter, kinds, run, config, report, trees=trees)
    return found


def cheap_jobs(out: Path, run: Config, config: Config, report: Progress) -> dict[str, Document]:
    """Leaderboards of the chain policies on the recorded traces, were a draft step as cheap as config.toml says."""
    found = {}
    for drafter in config["drafters"]:
        folder = out / run["name"] / drafter
        trace, cost = read_trace(folder / "trace"), ConstantCost(config["cheap"]["step_ratio"], 1.0)
        kinds = [POLICIES[name] for name in config["chains"]]
        found[drafter] = board(folder / "cheap.json", drafter, trace, cost, kinds, config, report)
    return found


def early_exits(out: Path, config: Config, report: Progress) -> dict[str, Path]:
    """The early exits of the ablation and of the sweeps, trained alike: name -> folder."""
    train, sweep = config["train"], config["sweep"]
    base = EesdSettings(layers=train["layers"])
    wanted = {BASE: base, NO_DISTILLATION: base}
    wanted |= {f"N = {n}": replace(base, layers=n) for n in sweep["layers"] if n != base.layers}
    wanted |= {f"E = {e}": replace(base, exit_layers=e) for e in sweep["exit_layers"] if e != base.exit_layers}
    pair = load_pair(dtype=train["dtype"], threads=config["threads"])
    default = LoopSettings(steps=1, warmup_steps=40, dtype=train["dtype"])
    loop = replace(default, steps=int(1e6 * train["tokens"] / (default.batch_windows * default.window_tokens)))
    folders = {}
    for name, settings in wanted.items():
        folders[name] = folder = out / "early-exits" / name.replace(" ", "").replace("=", "-")
        text = TextSettings(generated_share=0.0) if name == NO_DISTILLATION else TextSettings()
        train_eesd(pair, settings, TextRun(text, loop, folder, out / "text", progress=named(report, name)))
    return folders


@dataclass(frozen=True)
class Exits:
    """Validations of early exits. ablation : what is left out -> (validation, label of its row); others by number"""

    ablation: Mapping[str, tuple[Document, str]]
    layers: Mapping[int, Document]
    exit_layers: Mapping[int, Document]


def early_exit_jobs(out: Path, config: Config, report: Progress) -> Exits:
    """Train the early exits of the ablation and the sweeps and validate them, in the first way of decoding."""
    found, run = {}, config["runs"][0]
    for name, folder in early_exits(out, config, report).items():
        kinds: tuple[type[Policy], ...] = (PaperK, BetaTS)
        if name in WITH_PREDICTOR:
            add_predictor(folder, config, report)
            kinds = (*kinds, CaliParts)
        found[name] = validation(out / "ablation" / folder.name, folder, kinds, run, config, report)
    base = found[BASE]
    chosen = [
        ("EESD, Beta-TS", base, "beta_ts", ""),
        ("without early-exit layer", found["E = 0"], "beta_ts", ""),
        ("without self-distillation", found[NO_DISTILLATION], "beta_ts", ""),
        ("EESD, Cali-TS", base, "cali_ts", ""),
        ("without sampling prediction", base, "cali_ts", "sigma_s=1e+04"),
        ("without model prediction", base, "cali_ts", "sigma_s=1e-06"),
        ("without TS, best K", base, "fixed_k", ""),
        (f"without TS, K = {PAPER_K}", base, "fixed_k", f"fixed_k(k={PAPER_K})"),
    ]
    train, sweep = config["train"], config["sweep"]
    return Exits(
        ablation={what: (document, row_label(document, policy, mark)) for what, document, policy, mark in chosen},
        layers={n: found[BASE if n == train["layers"] else f"N = {n}"] for n in sweep["layers"]},
        exit_layers={e: found[BASE if e == 1 else f"E = {e}"] for e in sweep["exit_layers"]},
    )


def row_label(document: Document, policy: str, mark: str) -> str:
    """Label of the row of this policy with this in its label; by default of the unmarked one best in tuning."""
    rows = [row for row in document["rows"] if row["policy"] == policy]
    if mark:
        return next(str(row["label"]) for row in rows if mark in row["label"])
    plain = [row for row in rows if row["role"] == "tuned"]
    plain = [row for row in plain if "sigma_s=1e+04" not in row["label"] and "sigma_s=1e-06" not in row["label"]]
    row = first_best(plain)
    assert row is not None, f"no tuned {policy} was run"
    return str(row["label"])


def typical_job(out: Path, config: Config, medusa: Document, report: Progress) -> Document:
    """Typical acceptance of MEDUSA-1 with the sparse tree of its validation that is best on the tuning prompts."""
    done, asked = out / "typical.json", config["typical"]
    if not done.is_file():
        pair = load(config, "medusa-1")
        row = first_best(row for row in medusa["rows"] if row["policy"] == "sparse_tree")
        assert row is not None, "no sparse tree was run"
        settings = TypicalSettings(
            tuple(asked["epsilons"]), None, asked["temperature"], asked["max_new_tokens"], config["seed"]
        )
        prompts = study_prompts(pair.tokenizer, asked["prompts"])
        policy = make_policy(row["policy"], row["params"])
        document = compare_typical(pair, prompts, policy, settings, lambda n, total: report("typical", n, total))
        write_json(document, done)
    return dict(json.loads(done.read_text()))


def add_predictor(folder: Path, config: Config, report: Progress) -> None:
    """Train the drafter's predictor, for Cali-TS, beside it."""
    if (folder / FILE).is_file():
        return
    pair = load_pair(dtype=config["dtype"], threads=config["threads"], drafter=str(folder), predictor="none")
    prompts = lab_prompts(pair.tokenizer, config["train"]["predictor_prompts"], split="train")
    settings = PredictorSettings(max_draft_tokens=config["depth"], seed=config["seed"])
    document = train_predictor(pair, prompts, settings, folder / "predictor", named(report, "predictor"))
    Path(document["predictor"]).rename(folder / FILE)


def predictor_facts(drafters: Config) -> dict[str, Document]:
    """The facts of the lab's predictors, by drafter."""
    folders = {name: LAB_WEIGHTS / ("predictor" if name == "model" else name) for name in drafters}
    return {name: load_predictor(folder).facts for name, folder in folders.items() if (folder / FILE).is_file()}


def drafter_facts(drafters: Config) -> dict[str, Document]:
    """The facts of the lab's drafters inside the target, by name."""
    return {name: read_drafter(LAB_WEIGHTS / name).facts for name in drafters if name != "model"}
