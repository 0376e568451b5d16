"""`specsim replay`: replay a trace under one policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from specsim.cli.console import parse_settings, print_json, print_table
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
from specsim.errors import InputError


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
    as_: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Run and count rounds as this engine does (`specsim explain rounds`): with its counters.",
            metavar="ENGINE",
        ),
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="With --as, the engine's limit on output tokens; default the trace's.", min=1)
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Replay a trace under one policy and predict its speedup.

    A policy that learns from data or costs what --set does not give (renewal_stop,
    time_gain) learns on one part of the sequences and is reported on the other. Regret is
    the time beyond that of the oracle, which knows what will be accepted.

    Example: specsim replay TRACE --policy adaedl --set gamma=0.2 --cost profile.json
    """
    from specsim.api.predict import fitted_part, predict_fitted
    from specsim.replaying.priced import PricedTrace
    from specsim.speedup.prediction import oracle_name
    from specsim.trace.files import read_trace

    if max_output_tokens is not None and as_ is None:
        raise InputError("--max-output-tokens is an engine's limit; name the engine with --as")
    if as_ is not None:  # the engines' modules are not loaded otherwise
        from specsim.engines.as_engine import as_engine
        from specsim.engines.conventions import find_conventions
        from specsim.engines.counts import engine_counts

        conventions = find_conventions(as_)
    recorded, beyond = read_trace(trace), 0
    if as_ is not None:
        recorded, beyond = as_engine(recorded, conventions, max_output_tokens=max_output_tokens)
    priced = PricedTrace(recorded, read_costs(cost, draft_cost, batch))
    part, chosen, learned_on = fitted_part(priced, policy, parse_settings(set_), tuning_share, seed)
    prediction = predict_fitted(part, chosen, learned_on, expected=expected, seed=seed)
    document, oracle = prediction.as_dict(), oracle_name([type(prediction.policy)])
    counts = {} if as_ is None else engine_counts(part, chosen, conventions, seed=seed)
    if json:
        sizes = {name: getattr(prediction, name) for name in ("learned_on", "sequences")}
        engine = {"engine": {**counts, "sequences_cut_off": beyond}} if counts else {}
        print_json({**document, **sizes, "oracle_of": oracle, "approximate": priced.trace.approximate, **engine})
        return
    rows = [["speedup [95 % interval]", str(prediction.speedup)]]
    for key in ("v_d", "r_d", "hm", "tau", "seconds", "ar_seconds"):
        rows.append([key, f"{document[key]:.3f}"])
    trees = ["verified", "truncated_rounds"] if prediction.truncated_rounds is not None else []
    for key in ("rounds", "drafted", *trees, "accepted", "output_tokens"):
        rows.append([key, f"{document[key]:,}"])
    rows.append([f"regret to the oracle of {oracle}", percent_text(prediction.oracle_regret)])
    print_table("; ".join([str(prediction.policy), *prediction.notes]), ["quantity", "value"], rows)
    if counts:
        title = f"as {as_} counts"
        if beyond:
            title += (
                f"; of {beyond} sequences the last round may accept more, beyond what was recorded: record more tokens "
                "and give --max-output-tokens"
            )
        print_table(title, ["counter", "value"], list(_counter_rows(counts)))


def _counter_rows(counts: dict[str, Any]) -> Iterator[list[str]]:
    for name, value in {**counts, **counts["printed"]}.items():
        if name not in ("engine", "printed"):
            values = value if isinstance(value, list) else [value]
            yield [name, ", ".join(f"{one:.3f}" if isinstance(one, float) else f"{one:,}" for one in values)]


def percent_text(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
