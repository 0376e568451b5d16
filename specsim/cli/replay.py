"""`specsim replay`: replay a trace under a policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.cli.options import LEARNING_SHARE_HELP, CostSettings, PolicySettings, SeedSettings, TraceSettings
from specsim.io.errors import InputError
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.engines.definitions import EngineCounts
    from specsim.learn.predict import PolicyPrediction


RATES = {  # of a prediction, by the field's names
    "v_d": "draft acceptance rate (v_d)",
    "r_d": "share of output that was drafted (r_d)",
    "tau": "mean acceptance length (tau)",
    "seconds": "seconds",
    "ar_seconds": "seconds without speculation",
}


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(SeedSettings, PolicySettings, TraceSettings):
    """Trace and policy to replay, and how rounds are counted."""

    tuning_share: float = setting(0.5, LEARNING_SHARE_HELP)
    expected: bool = setting(
        False,
        "Compute the exact expectation over a policy's random draws (Thompson sampling) instead of one replay.",
        flag="--expected/--no-expected",
    )
    as_: str | None = setting(
        None, "Run and count rounds as this engine does; see `specsim explain rounds`.", metavar="ENGINE"
    )
    max_output_tokens: int | None = setting(
        None, "With --as: the engine's limit on output tokens (default: the trace's).", low=1
    )


def replay(options: ReplayOptions, costs: CostSettings) -> Answer:
    """Predict the speedup of one policy.

    Replays the trace under the policy. A policy that learns from data or costs what --set does not give (renewal_stop,
    time_gain) learns on one part of the sequences and is reported on the other. "Gap to oracle" is how much slower the
    policy is than an oracle that knows what will be accepted. "By Eq. 14" is the speedup by EESD's formula, from v_d,
    r_d and the costs' T_d / T_t alone; there is none for trees and SPACE.

    Example: specsim replay TRACE --policy adaedl --set gamma=0.2 --cost profile.json
    """
    from specsim.learn.predict import fitted_part, predict_fitted
    from specsim.replaying.prediction import oracle_name
    from specsim.replaying.priced import PricedTrace

    engine, trace, cut_off = options.as_, options.read(options.trace), 0
    if options.max_output_tokens is not None and engine is None:
        raise InputError("--max-output-tokens is an engine's limit; name the engine with --as")
    if engine is not None:  # the engines' modules are not loaded otherwise
        from specsim.cost.model import FullDraftCost
        from specsim.engines.acceptance_rules import RULES, find_rule
        from specsim.engines.as_engine import as_engine
        from specsim.engines.conventions import find_conventions
        from specsim.engines.definitions import engine_counts
        from specsim.trace.accepted import accepted_by, rule_of, shares_noise
        from specsim.trace.joined import LOOKUP, SUFFIX

        conventions = find_conventions(engine)
        shared = shares_noise(trace)
        drafts_text = trace.drafter_kind in (LOOKUP, SUFFIX)  # accepted alike by every rule
        sampled = rule_of(trace) is not None and not drafts_text and not shared
        if options.accept is None and conventions.engine in RULES and sampled:
            trace = accepted_by(trace, find_rule(conventions.engine))
        trace, cut_off = as_engine(trace, conventions, max_output_tokens=options.max_output_tokens)
    priced = PricedTrace(trace, costs.read())
    part, chosen, learned_on = fitted_part(priced, options.policy, options.settings, options.tuning_share, options.seed)
    if engine is not None and conventions.pads_lookup and part.trace.drafter_kind == LOOKUP:
        part = PricedTrace(part.trace, FullDraftCost(part.cost, chosen.max_draft_tokens))
    prediction = predict_fitted(part, chosen, learned_on, expected=options.expected, seed=options.seed)
    oracle = oracle_name([type(prediction.policy)])
    document = {
        **prediction.as_dict(),
        "learned_on": prediction.learned_on,
        "sequences": prediction.sequences,
        "oracle_of": oracle,
    }
    if engine is None:
        return Answer(document, partial(_print_prediction, prediction, oracle))
    counts = engine_counts(part, chosen, conventions, seed=options.seed)
    document["engine"] = {**counts._asdict(), "sequences_cut_off": cut_off, "shares_noise": shared}

    def show() -> None:
        _print_prediction(prediction, oracle)
        title = f"as {engine} counts"
        if cut_off:
            title += (
                f"; the last round of {cut_off} sequences may accept more than was recorded: record more tokens and "
                "give --max-output-tokens"
            )
        if shared:
            title += (
                "; drafts share the target's noise, as no engine's do: record with --mode greedy-draft or rejection"
            )
        print_table(title, ["counter", "value"], list(_counter_rows(counts)))

    return Answer(document, show)


def _print_prediction(prediction: PolicyPrediction, oracle: str) -> None:
    rows = [["speedup [95 % interval]", str(prediction.speedup)]]
    if prediction.eq14 is not None:
        by = f"by Eq. 14 with T_d / T_t = {prediction.cost_ratio:.3g} of these costs"
        rows.append([by, f"{prediction.eq14:.3f}"])
    for key, quantity in RATES.items():
        rows.append([quantity, f"{getattr(prediction, key):.3f}"])
    trees = ["verified", "truncated_rounds"] if prediction.truncated_rounds is not None else []
    for key in ("rounds", "drafted", *trees, "accepted", "output_tokens"):
        rows.append([key, f"{getattr(prediction, key):,}"])
    regret = prediction.oracle_regret
    rows.append([f"gap to the oracle of {oracle}", "" if regret is None else f"{100 * regret:.1f} %"])
    print_table("; ".join([str(prediction.policy), *prediction.notes]), ["quantity", "value"], rows)


def _counter_rows(counts: EngineCounts) -> Iterator[list[str]]:
    for name, value in {**counts._asdict(), **counts.printed}.items():
        if name not in ("engine", "printed"):
            values = value if isinstance(value, list) else [value]
            yield [name, ", ".join(f"{v:.3f}" if isinstance(v, float) else f"{v:,}" for v in values)]
