"""`specsim replay`: replay a trace under one policy."""

from __future__ import annotations

from typing import Annotated

import typer

from specsim.cli.console import parse_settings, prepare_compiler, print_json, print_table
from specsim.cli.options import (
    BatchOption,
    CostOption,
    DraftCostOption,
    JsonOption,
    LearningShareOption,
    PolicyOption,
    SeedOption,
    SetOption,
    TraceArgument,
    read_costs,
)


def replay(
    trace: TraceArgument,
    policy: PolicyOption,
    cost: CostOption,
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    set_: SetOption = [],  # noqa: B006 (typer reads the default, it is never changed)
    tuning_share: LearningShareOption = 0.5,
    expected: Annotated[
        bool,
        typer.Option(help="The exact expectation over what the policy draws (Thompson sampling), not one replay."),
    ] = False,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Replay a trace under one policy and predict its speedup.

    A policy that learns from data or costs what --set does not give (renewal_stop,
    time_gain) learns on one part of the sequences and is reported on the other. Regret is
    the time beyond that of the oracle, which knows what will be accepted.

    Example: specsim replay TRACE --policy adaedl --set gamma=0.2 --cost profile.json
    """
    from specsim.api.predict import predict_with
    from specsim.replaying.priced import PricedTrace
    from specsim.speedup.prediction import oracle_name
    from specsim.trace.files import read_trace

    prepare_compiler()
    priced = PricedTrace(read_trace(trace), read_costs(cost, draft_cost, batch))
    prediction = predict_with(
        priced, policy, parse_settings(set_), tuning_share=tuning_share, expected=expected, seed=seed
    )
    document, oracle = prediction.as_dict(), oracle_name([type(prediction.policy)])
    if json:
        sizes = {name: getattr(prediction, name) for name in ("learned_on", "sequences")}
        print_json({**document, **sizes, "oracle_of": oracle, "approximate": priced.trace.approximate})
        return
    rows = [["speedup [95 % interval]", str(prediction.speedup)]]
    for key in ("v_d", "r_d", "hm", "tau", "seconds", "ar_seconds"):
        rows.append([key, f"{document[key]:.3f}"])
    trees = ["verified", "truncated_rounds"] if prediction.truncated_rounds is not None else []
    for key in ("rounds", "drafted", *trees, "accepted", "output_tokens"):
        rows.append([key, f"{document[key]:,}"])
    rows.append([f"regret to the oracle of {oracle}", percent_text(prediction.oracle_regret)])
    print_table("; ".join([str(prediction.policy), *prediction.notes]), ["quantity", "value"], rows)


def percent_text(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
