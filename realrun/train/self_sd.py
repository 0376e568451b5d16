"""Self-SD's set of skipped sublayers, found by Bayesian optimisation (Draft & Verify, section 3.2).

The target decodes calibration prompts once. A candidate set is then recorded densely on these texts and replayed under
every draft length K; its value is the speedup at the best K. Costs are measured once, with and without all attention
and all MLP sublayers, and are linear in the number of sublayers left. Nothing is decoded for a candidate unless the
objective is the measured tokens/s.

Differences from the paper: it maximises tokens/s at a fixed stopping threshold, with a Gaussian process over a relaxed
[0, 1] for every sublayer. Here the value is the predicted speedup at the best K, which other jobs on the machine do not
disturb, and the optimiser is Optuna's tree-structured Parzen estimator, which is made for discrete choices.

A candidate's step is interpolated between four measured steps: with all sublayers, without the MLPs, without attention,
and without both. Every repeat runs all four in shuffled order, so that other work on the machine disturbs them equally.
A suggestion depends only on the seed and the trials so far, so that a killed search continues as if it had not been
killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.self_sd import SelfSDKind, SkippingLM
from realrun.kept_files import refuse_file, refuse_other
from realrun.lm.split_target import SplitTarget
from realrun.lm.variants import NOTHING, SkippedSublayers
from realrun.measure.curve import along_contexts
from realrun.measure.rounds import ScriptedVerifier, scripted_round
from realrun.measure.stream import Stream
from realrun.measure.sweeps import AUTOREGRESSIVE_BURST
from realrun.pairs.drafter_files import describe_target, save_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.target_cache import target_cache_columns
from realrun.provenance import provenance
from realrun.train.common.on_text import Summary
from realrun.train.common.trainings import PromptOptions, Training, sampler_at
from specsim.cost.profile import ProfileCost, ProfileSeconds, profile_from_json
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.progress import Progress
from specsim.io.settings import Settings, setting
from specsim.learn.evaluate import evaluate_many
from specsim.learn.search import tpe_sampler
from specsim.learn.storage import open_study
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import optuna
    from optuna.study import Study


JOURNAL, REPORT = "search.jsonl", "search.json"


@dataclass(frozen=True)
class SelfSDSettings(Settings):
    """Settings of the search."""

    trials: int = setting(200, low=1, smoke=8, doc="Number of sets of sublayers to try.")
    max_new_tokens: int = setting(64, low=1, smoke=16, doc="Maximum output tokens per prompt.")
    max_draft_tokens: int = setting(8, low=1, high=64, smoke=4, doc="Maximum draft length, in tokens.")
    objective: Literal["predicted", "measured"] = setting(
        "predicted", doc="Maximise the predicted speedup at the best draft length, or measured tokens/s."
    )
    temperature: float = setting(0.0, low=0, below=100, doc="Temperature of the calibration text; 0 is greedy.")
    keep_ends: int = setting(0, low=0, doc="Layers at either end that skip nothing.")
    cost_repeats: int = setting(40, low=2, smoke=8, doc="Timed rounds of every draft length.")
    seed: int = setting(0)

    @property
    def sampler(self) -> Sampler:
        return sampler_at(self.temperature, self.seed)


@dataclass(frozen=True)
class Trial:
    """A set that was tried, and what it is worth at the best draft length k."""

    skips: SkippedSublayers
    k: int
    first_token_accepted_share: float
    predicted_speedup: float
    tokens_per_s: float | None = None

    @property
    def value(self) -> float:
        """What the search maximises."""
        return self.predicted_speedup if self.tokens_per_s is None else self.tokens_per_s

    @classmethod
    def from_json(cls, trial: dict[str, Any]) -> Trial:
        """Read what `as_dict` made."""
        skips = SkippedSublayers(frozenset(trial["attention"]), frozenset(trial["mlp"]))
        figures = trial["k"], trial["first_token_accepted_share"], trial["predicted_speedup"]
        return cls(skips, *figures, trial.get("tokens_per_s"))

    def as_dict(self) -> dict[str, Any]:
        measured = {} if self.tokens_per_s is None else {"tokens_per_s": self.tokens_per_s}
        return {
            **self.skips.in_order,
            "k": self.k,
            "first_token_accepted_share": self.first_token_accepted_share,
            "predicted_speedup": self.predicted_speedup,
            **measured,
            "value": self.value,
        }


@dataclass(frozen=True)
class SearchCosts:
    """Mean costs at the smallest and the largest context, in cached tokens.

    draft_step : seconds [2, 2, D, C] of the d-th draft step of a round; first index: whether all attention is skipped,
        second: all MLPs
    rounds : all other costs, as in a cost profile
    """

    contexts: list[int]
    draft_step: list[list[list[list[float]]]]
    rounds: ProfileSeconds


@dataclass(frozen=True)
class SelfSdSearch:
    """A finished search: its best set, and what the drafter's file at `path` says of it."""

    path: Path
    trials: Sequence[Trial]
    best: Trial
    file_document: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        trials = [trial.as_dict() for trial in self.trials]
        return {**self.file_document, "best": self.best.as_dict(), "trials": trials, "drafter": str(self.path)}

    def summary(self) -> Summary:
        best, labels = self.best, {"attention": "attention skipped in layers", "mlp": "MLP skipped in layers"}
        skipped = [
            [labels[part], ", ".join(map(str, layers)) or "none"] for part, layers in best.skips.in_order.items()
        ]
        rows = [
            *skipped,
            ["best draft length", str(best.k)],
            ["first draft token accepted", f"{best.first_token_accepted_share:.3f}"],
            ["predicted speedup", f"{best.predicted_speedup:.2f}"],
        ]
        return Summary(f"best of {len(self.trials)} sets, on calibration text", ["", ""], rows)


def train_self_sd(
    pair: Pair, prompts: Sequence[Prompt], settings: SelfSDSettings, out: Path, progress: Progress
) -> SelfSdSearch:
    """Search the sublayers to skip, and write OUT/drafter.safetensors and OUT/search.json.

    pair : only its target and tokenizer are used
    prompts : prompts that the target continues for calibration
    out : folder of the drafter. A killed run with the same settings is continued; it may have more trials
    progress : called with (stage, done, total)

    Raises InputError if the folder holds another search, prompts are missing or too long, or no sublayer can be
    skipped.

    References: Zhang et al. 2024 (Draft & Verify), section 3.2.
    """
    refuse_file(out)
    SelfSDKind.check_target(pair.target)
    pair = replace(pair, drafter=SelfSDKind(), predictor=None)
    choices = sublayers(len(pair.target.model.layers), settings.keep_ends)
    _check_lengths(pair, prompts, settings)
    plan = _plan_document(pair, prompts, settings)
    with open_study(out / JOURNAL, "self-sd", "maximize") as study:
        instead = "give another folder, or delete it to search anew"
        refuse_other(f"{out} holds another search,", _kept(study, "plan", lambda: plan), plan, instead)
        texts = _calibration(pair, prompts, settings, study, progress)
        contexts = (min(len(p) for p, _ in texts) - 1, max(len(p) + len(o) for p, o in texts) - 2)
        how = (settings.max_draft_tokens, settings.cost_repeats, settings.sampler, settings.seed)
        costs = _kept(study, "costs", lambda: asdict(measure_costs(pair, contexts, *how, progress)))
        search = Search(pair, texts, settings, SearchCosts(**costs))
        trials = _search(search, choices, settings, study, progress)
    best = max(trials, key=lambda trial: trial.value)  # the first of equals
    document = _file_document(search, best, prompts)
    found = SelfSdSearch(save_drafter(out, "self-sd", {}, document), trials, best, document)
    write_json({**found.as_dict(), "drafter": found.path.name}, out / REPORT)
    return found


class Search:
    """Evaluates candidates on calibration texts (prompt, output) with measured costs."""

    def __init__(
        self, pair: Pair, texts: Sequence[tuple[list[int], list[int]]], settings: SelfSDSettings, costs: SearchCosts
    ):
        self.pair, self.texts, self.settings = pair, texts, settings
        self.steps_s = np.array(costs.draft_step)
        seconds = {**costs.rounds, "draft_step": costs.draft_step[0][0]}
        self.profile = profile_from_json({"contexts": costs.contexts, "median_s": seconds}, JOURNAL)
        self.split = SplitTarget(pair.target, 0)
        self.layers = len(pair.target.model.layers)

    def try_out(self, skips: SkippedSublayers, really: bool = True) -> Trial:
        """Evaluate a candidate: the set, the best K and its value; really : decode if the objective is "measured"."""
        trace, cost, depth = self.record(skips), self.cost(skips), self.settings.max_draft_tokens
        tried = evaluate_many(FixedK, [{"k": k} for k in range(1, depth + 1)], PricedTrace(trace, cost), jobs=1)
        k = 1 + int(np.argmin(tried.seconds))
        speedup, accepted = float(tried.baseline_s / tried.seconds[k - 1]), float((trace.match_len > 0).mean())
        measured = really and self.settings.objective == "measured"
        return Trial(skips, k, accepted, speedup, self.tokens_per_s(skips, k) if measured else None)

    def record(self, skips: SkippedSublayers) -> Trace:
        """Record the dense trace of this candidate."""
        settings, lm = self.settings, SkippingLM(self.split, skips)
        recorded = [
            target_cache_columns(
                self.split,
                lm,
                RecordRequest(prompt, output, settings.max_draft_tokens, settings.sampler, sequence),
                ranks=False,
            )
            for sequence, (prompt, output) in enumerate(self.texts)
        ]
        columns: dict[str, Any] = {name: np.concatenate([c[name] for c in recorded]) for name in recorded[0]}
        lengths = [len(output) for _, output in self.texts]
        return Trace(
            meta={"drafter_kind": "self-sd", "eos_token_id": list(self.pair.eos_token_ids)},
            sequence_id=np.arange(len(lengths)),
            domain=np.full(len(lengths), "calibration"),
            prompt_tokens=np.array([len(prompt) for prompt, _ in self.texts]),
            budget_tokens=np.full(len(lengths), settings.max_new_tokens),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            **columns,
        )

    def cost(self, skips: SkippedSublayers) -> ProfileCost:
        """Interpolate the costs of this candidate's rounds."""
        step_s = self.steps_s
        for skipped in skips:
            share = len(skipped) / self.layers
            step_s = (1 - share) * step_s[0] + share * step_s[1]
        return replace(self.profile, draft_step_s=step_s)

    def mean_costs(self, skips: SkippedSublayers) -> dict[str, float]:
        """Compute mean costs in seconds; a sublayer's are those when nothing else is skipped."""
        ((full, no_mlp), (no_attention, neither)) = self.steps_s.mean(axis=(2, 3)).tolist()
        others = ("autoregressive_s", "verify_s", "round_overhead_s")
        return {
            "draft_step_s": float(self.cost(skips).draft_step_s.mean()),
            "full_step_s": full,
            "attention_s": (full - no_attention) / self.layers,
            "mlp_s": (full - no_mlp) / self.layers,
            "ends_s": neither,
            **{name: float(np.mean(getattr(self.profile, name))) for name in others},
        }

    def warnings(self) -> list[str]:
        """List signs that the measured costs are wrong, a sentence each."""
        warnings = []
        costs, nothing = self.mean_costs(NOTHING), self.try_out(NOTHING, really=False).predicted_speedup
        if nothing > 1:  # each of its draft steps is an autoregressive step, and verification comes on top
            warnings.append(
                f"with nothing skipped the measured costs predict a speedup of {nothing:.2f}; at most 1 is possible; "
                "other work disturbed them: search again in a new folder on a quieter machine"
            )
        if min(costs["attention_s"], costs["mlp_s"]) <= 0:
            warnings.append(
                "skipping all sublayers of a kind made measured draft steps slower; other work disturbed them: search "
                "again in a new folder on a quieter machine"
            )
        return warnings

    def tokens_per_s(self, skips: SkippedSublayers, k: int) -> float:
        """Measure tokens/s of decoding all texts with this draft length."""
        pair, settings = replace(self.pair, drafter=SelfSDKind(skips)), self.settings
        decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, settings.sampler)
        decoder.decode(self.texts[0][0], min(8, settings.max_new_tokens), FixedK(k))  # for warmth
        runs = [
            decoder.decode(prompt, settings.max_new_tokens, FixedK(k), sequence=sequence)
            for sequence, (prompt, _) in enumerate(self.texts)
        ]
        return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)


def _file_document(search: Search, best: Trial, prompts: Sequence[Prompt]) -> dict[str, Any]:
    pair, settings = search.pair, search.settings
    priced = PricedTrace(search.record(best.skips), search.cost(best.skips))
    prediction = predict_policy(priced, FixedK(best.k), seed=settings.seed)
    return {
        "target": describe_target(pair.target, pair.target_name),
        **best.skips.in_order,
        "k": best.k,
        "first_token_accepted_share": best.first_token_accepted_share,
        "predicted_speedup": best.predicted_speedup,
        "prediction": prediction.as_dict(),
        "settings": asdict(settings),
        "prompts": prompt_digest(prompts),
        "calibration": {"sequences": len(prompts), "output_tokens": sum(len(output) for _, output in search.texts)},
        "costs": search.mean_costs(best.skips),
        "warnings": search.warnings(),
        "provenance": provenance(pair.device, pair.number_type),
    }


def _kept(study: Study, name: str, find: Callable[[], Any]) -> Any:
    if name not in study.user_attrs:
        study.set_user_attr(name, find())
    return study.user_attrs[name]


def _search(
    search: Search, choices: Sequence[Sublayer], settings: SelfSDSettings, study: Study, progress: Progress
) -> list[Trial]:
    trials = [Trial.from_json(trial.user_attrs) for trial in study.get_trials()[: settings.trials]]
    progress("search", len(trials), settings.trials)
    while len(trials) < settings.trials:
        skips = suggest(choices, trials, settings.seed)
        known = (trial for trial in trials if trial.skips == skips)
        trial = next(known, None) or search.try_out(skips)
        study.add_trial(stored(choices, trial))
        trials.append(trial)
        progress("search", len(trials), settings.trials)
    return trials


def _calibration(
    pair: Pair, prompts: Sequence[Prompt], settings: SelfSDSettings, study: Study, progress: Progress
) -> list[tuple[list[int], list[int]]]:
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, settings.sampler)
    texts = []
    for sequence, prompt in enumerate(prompts):
        name = f"calibration {sequence}"
        if name not in study.user_attrs:
            decoded = decoder.decode(prompt.tokens, settings.max_new_tokens, None, sequence=sequence)
            study.set_user_attr(name, {"output": decoded.tokens})
        texts.append((prompt.tokens, study.user_attrs[name]["output"]))
        progress("decode", sequence + 1, len(prompts))
    return texts


def _check_lengths(pair: Pair, prompts: Sequence[Prompt], settings: SelfSDSettings) -> None:
    if not prompts:
        raise InputError("a search for skipped sublayers needs calibration prompts; give at least 1")
    limit = int(pair.target.config.max_position_embeddings)
    longest = max(len(prompt.tokens) for prompt in prompts) + settings.max_new_tokens + settings.max_draft_tokens + 2
    if longest > limit:
        raise InputError(
            f"longest prompt, output and draft make {longest} tokens, the target has {limit} positions; shorten them"
        )


def _plan_document(pair: Pair, prompts: Sequence[Prompt], settings: SelfSDSettings) -> dict[str, Any]:
    """Collect everything that determines a trial; the number of trials is left out because it may grow."""
    target = describe_target(pair.target, "")
    del target["name"]  # its weights identify it
    return {
        "search": "self-sd",
        "target": target,
        "dtype": pair.number_type,
        "device": pair.device.type,
        "eos_token_ids": list(pair.eos_token_ids),
        "prompts": prompt_digest(prompts),
        **{name: value for name, value in asdict(settings).items() if name != "trials"},
        "libraries": {"optuna": version("optuna")},
    }


SELF_SD = Training(
    "self-sd",
    SelfSDSettings,
    train_self_sd,
    """Search the sublayers that Self-SD skips.

    Nothing is trained. Then `realrun record --drafter OUT`.

    Example: realrun train self-sd --out skips --trials 200
    """,
    shared=PromptOptions,
)


WARMUP_ROUNDS = 3


@torch.inference_mode()
def measure_costs(
    pair: Pair, contexts: tuple[int, int], depth: int, repeats: int, sampler: Sampler, seed: int, progress: Progress
) -> SearchCosts:
    """Measure mean costs, as in a profile, at the smallest and the largest context, in cached tokens."""
    target, drafter = pair.make_drafter(())
    assert isinstance(drafter, DraftModel) and isinstance(drafter.lm, SkippingLM)
    decoder = Decoder(target, drafter, (), sampler, ScriptedVerifier())
    everything, nothing = frozenset(range(len(pair.target.model.layers))), frozenset[int]()
    sets = [SkippedSublayers(attention, mlp) for attention in (nothing, everything) for mlp in (nothing, everything)]
    measured = [max(2, contexts[0]), max(3, contexts[0] + 1, contexts[1])]
    drafter.prepare(measured[1] + depth + 2, sampler, 0, depth + 2)
    rng = np.random.default_rng(seed)
    streams = [Stream() for _ in sets]
    for done, context in enumerate(measured):
        tokens = rng.integers(1, min(int(pair.target.config.vocab_size), len(pair.tokenizer)), context + 1).tolist()
        target.reset()
        target.prefill(tokens[:-1])
        drafter.begin(tokens[:-1])
        # Drafts of maximum length measure draft steps; verification is measured with the cheapest drafts.
        jobs = [(number, depth) for number in range(len(sets))] + [(3, size) for size in range(depth)]
        for repeat in range(WARMUP_ROUNDS + repeats):
            for job in rng.permutation(len(jobs)).tolist():
                number, size = jobs[job]
                drafter.lm.skips = sets[number]
                scripted_round(decoder, tokens, context, size, 0, rng)  # for warmth
                for _ in range(1 if size else AUTOREGRESSIVE_BURST):
                    round_ = scripted_round(decoder, tokens, context, size, 0, rng)
                    if repeat >= WARMUP_ROUNDS and size:
                        streams[number].add(round_, context)
                    elif repeat >= WARMUP_ROUNDS:
                        streams[number].add_baseline(round_, context)
            progress("costs", done * (WARMUP_ROUNDS + repeats) + repeat + 1, 2 * (WARMUP_ROUNDS + repeats))

    steps = [
        [along_contexts(stream.points["draft", place], measured).tolist() for place in range(1, depth + 1)]
        for stream in streams
    ]
    rounds = streams[3].tables(measured, depth, [], masks=False)["mean_s"]
    return SearchCosts([contexts[0], measured[1]], [steps[:2], steps[2:]], rounds)


ATTEMPTS = 20  # at a set that was not tried before


class Sublayer(NamedTuple):
    """part : "attention" or "mlp"; layer : from 0"""

    part: str
    layer: int

    @property
    def key(self) -> str:
        """Name the sublayer for the estimator."""
        return f"{self.part}.{self.layer}"


def sublayers(layers: int, keep_ends: int) -> list[Sublayer]:
    """List the sublayers that may be skipped: all but those of `keep_ends` layers at either end."""
    free = range(keep_ends, layers - keep_ends)
    if not free:
        raise InputError(
            f"keep_ends={keep_ends} leaves none of {layers} layers to skip; keep at most {(layers - 1) // 2}"
        )
    return [Sublayer(part, layer) for part in ("attention", "mlp") for layer in free]


def suggest(choices: Sequence[Sublayer], trials: Sequence[Trial], seed: int) -> SkippedSublayers:
    """Suggest the next set, after trials whose value is to maximise.

    The first sets are the attention, the MLPs, and both, of every other layer; the estimator suggests the others. If it
    repeats a tried set, it is asked again, and after ATTEMPTS times sublayers of the set are changed at random until it
    is new. The empty set is never suggested. A set is repeated only after all sets have been tried.
    """
    tried = {NOTHING, *(trial.skips for trial in trials)}
    for skips in _probes(choices):
        if skips not in tried:
            return skips
    import optuna  # takes a second to import

    study = optuna.create_study(direction="maximize", sampler=tpe_sampler(seed, len(trials)))
    study.add_trials([stored(choices, trial) for trial in trials])
    for _ in range(ATTEMPTS):
        asked = study.ask(_distributions(choices))
        skips = _chosen([choice for choice in choices if asked.params[choice.key]])
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
        if skips not in tried:
            return skips
    rng = np.random.default_rng((seed, len(trials)))
    skipped = {choice for choice in choices if choice.layer in getattr(skips, choice.part)}
    while skips in tried and len(tried) < 2 ** len(choices):
        skipped ^= {choices[int(rng.integers(len(choices)))]}
        skips = _chosen(sorted(skipped))
    return skips


def stored(choices: Sequence[Sublayer], trial: Trial) -> optuna.trial.FrozenTrial:
    """Return a trial as Optuna stores it, whole in its attributes."""
    import optuna

    params = {choice.key: int(choice.layer in getattr(trial.skips, choice.part)) for choice in choices}
    return optuna.trial.create_trial(
        params=params, distributions=_distributions(choices), value=trial.value, user_attrs=trial.as_dict()
    )


def _distributions(choices: Sequence[Sublayer]) -> dict[str, optuna.distributions.BaseDistribution]:
    import optuna

    return {choice.key: optuna.distributions.CategoricalDistribution((0, 1)) for choice in choices}


def _probes(choices: Sequence[Sublayer]) -> list[SkippedSublayers]:
    other = [choice for choice in choices if choice.layer % 2]
    attention, mlp = ([choice for choice in other if choice.part == part] for part in ("attention", "mlp"))
    return [_chosen(attention), _chosen(mlp), _chosen(other)]


def _chosen(choices: Sequence[Sublayer]) -> SkippedSublayers:
    return SkippedSublayers(*(frozenset(c.layer for c in choices if c.part == part) for part in ("attention", "mlp")))
