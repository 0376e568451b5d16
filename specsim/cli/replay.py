"""`specsim replay`: replay a trace under one policy."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specsim.cli.console import parse_settings, print_json, print_table
from specsim.cli.options import (
    BatchOption,
    CostOption,
    DraftCostOption,
    JsonOption,
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
    set_: SetOption = [],  # noqa: B006 (typer reads the default, nobody changes it)
    tuning_share: Annotated[
        float, typer.Option(help="Share of the sequences that a policy which learns from data learns from.")
    ] = 0.5,
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
    from specsim.fitting.fit import fit, needs_fitting
    from specsim.policy.base import build_policy
    from specsim.policy.registry import find_policy
    from specsim.replaying.table import cost_table
    from specsim.speedup.prediction import oracle_seconds, predict, summarise
    from specsim.trace.files import read_trace
    from specsim.tuning.space import cap_depth

    whole, model = read_trace(trace), read_costs(cost, draft_cost, batch)
    settings: dict[str, Any] = {**parse_settings(set_)}
    kind = find_policy(policy)
    settings = {**cap_depth(kind, whole.depth), **settings}
    chosen = build_policy(kind, settings)
    part, learned_on = whole, 0
    if needs_fitting(type(chosen)):
        from specsim.trace.split import split_sequences

        tuning, held = split_sequences(whole, tuning_share=tuning_share, seed=seed)
        train = whole.select(tuning)
        learned = fit(type(chosen), settings, train, cost_table(train, model))
        if learned != chosen:  # not all was given
            chosen, part, learned_on = learned, whole.select(held), len(tuning)
    if expected:
        from specsim.errors import InputError
        from specsim.policy.chain.base import ChainPolicy
        from specsim.replaying.expected import expected_replay

        if not isinstance(chosen, ChainPolicy):
            raise InputError(f"policy {chosen.name} is of trees, which --expected does not average; replay it")

        table = cost_table(part, model)
        result = expected_replay(part, chosen, cost_table(part, model, chosen))
        prediction = summarise(result, oracle_seconds(part, [type(chosen)], table, seed=seed))
    else:
        prediction = predict(part, chosen, model, seed=seed)
    document = prediction.as_dict()
    if json:
        sizes = {"learned_on": learned_on, "sequences": part.sequences, "approximate": whole.approximate}
        print_json({**document, **sizes})
        return
    rows = [["speedup [95 % interval]", str(prediction.speedup)]]
    for key in ("v_d", "r_d", "hm", "tau", "seconds", "ar_seconds"):
        rows.append([key, f"{document[key]:.3f}"])
    trees = ["verified", "truncated_rounds"] if prediction.truncated_rounds is not None else []
    for key in ("rounds", "drafted", *trees, "accepted", "output_tokens"):
        rows.append([key, f"{document[key]:,}"])
    rows.append(["oracle regret", percent_text(prediction.oracle_regret)])
    notes = [f"learned on {learned_on} sequences, reported on {part.sequences} others"] if learned_on else []
    if expected:
        notes.append("expected")
    if whole.approximate:
        notes.append("approximate: rejection sampling")
    print_table("; ".join([str(chosen), *notes]), ["quantity", "value"], rows)


def percent_text(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
