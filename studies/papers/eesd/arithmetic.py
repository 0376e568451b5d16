"""EESD: do tables 1 to 3, 5 and 10 to 13 agree with their own arithmetic?"""

from __future__ import annotations

from collections.abc import Iterator

from specsim.acceptance.formulas import harmonic_mean
from specsim.cost.roofline.architecture import Architecture, find_architecture
from studies.papers.eesd.runs import AUTOREGRESSIVE, DETAILED, Run, find_run, implied_cost_ratio, output_tokens, runs
from studies.papers.record import Finding, Verdict, finding, slug
from studies.papers.tables import Row, read_table, recompute, rounded_to, stated

SUMMARIES = {"gsm8k": "eesd_1", "xsum": "eesd_1", "humaneval": "eesd_2", "mt_bench": "eesd_3"}
MIRRORED = ("LLaMA-2-70B-chat", "Vanilla SD", "LLaMA-2-7B-chat")  # on XSum: v_d and r_d of the row below, exchanged
TARGETS = {"70B": "llama-2-70b", "13B": "llama-2-13b"}  # shapes of the targets
CODE_VOCABULARY = 32016  # of CodeLLaMA


def audit() -> Iterator[Finding]:
    """Yield all findings of this module."""
    for run in runs():
        yield harmonic(run)
        yield from speedups(run)
        yield summary(run)
    yield from rates()
    yield from fixed_k_baselines()
    yield from vicuna_baselines()
    yield shared_baseline()
    yield from mirrored_row()
    yield from weights()


def percent_hm(v_d: float, r_d: float) -> float:
    return 100 * float(harmonic_mean(v_d, r_d))


def harmonic(run: Run) -> Finding:
    """HM from v_d and r_d."""
    value, allowed = recompute(percent_hm, *run.cells("v_d", "r_d"))
    agrees = allowed.meets(run.row.interval("hm_percent"))
    text = (
        f"v_d {run.row['v_d']} and r_d {run.row['r_d']} allow HM {allowed.low:.2f} to {allowed.high:.2f}; printed "
        f"{run.row['hm_percent']}"
    )
    place = run.row.place("hm_percent")
    return finding(f"eesd.hm.{run.slug}", value, "%", agrees, text, place, within=allowed, flaw="F3")


def speedups(run: Run) -> Iterator[Finding]:
    """Speedup from times and from rates."""
    for name, words, column, above, below in (
        ("time_ratio", "times", "time_s", run.baseline, run.row),
        ("rate_ratio", "rates", "tokens_per_s", run.row, run.baseline),
    ):
        ratio, allowed = recompute(lambda a, b: a / b, above[column], below[column])
        agrees = allowed.meets(run.row.interval("speedup"))
        text, place = f"{words} give {ratio:.3f}, printed {run.row['speedup']}", run.row.place("speedup")
        yield finding(f"eesd.{name}.{run.slug}", ratio, "x", agrees, text, place, within=allowed, flaw="F4")


def summary(run: Run) -> Finding:
    """Speedup of the detailed table, compared with tables 1 to 3."""
    table = read_table(SUMMARIES[run.dataset])
    cells = {"target": run.target, "method": run.method, "drafter": run.row["drafter"], "dataset": run.dataset}
    row = table.row(*(cells[key] for key in table.keys))
    agrees = all(row[column] == run.row[column] for column in ("speedup", "hm_percent"))
    text = f"{table.place} prints {row['speedup']}, {run.row.table.place} {run.row['speedup']}"
    places = (row.place("speedup"), run.row.place("speedup"))
    flaw = "F1" if run.dataset == "gsm8k" else "F2"
    return finding(f"eesd.summary.{run.slug}", row.number("speedup"), "x", agrees, text, *places, flaw=flaw)


def rates() -> Iterator[Finding]:
    """Tokens per second times time is 512 tokens, for the baselines too."""
    worst, tokens = 0.0, output_tokens()
    for table, dataset in DETAILED.items():
        for row in read_table(table).rows:
            rate, allowed = recompute(lambda time_s: tokens / time_s, row["time_s"])
            worst = max(worst, abs(rate / row.number("tokens_per_s") - 1))
            agrees = allowed.meets(row.interval("tokens_per_s"))
            name = f"eesd.rate.{slug(dataset, *(row[key] for key in row.table.keys))}"
            text = f"{tokens:.0f} tokens in {row['time_s']} s are {rate:.2f}, printed {row['tokens_per_s']}"
            place = row.place("tokens_per_s")
            yield finding(name, rate, "tokens/s", agrees, text, place, within=allowed, flaw="F6")
    text = "largest deviation of a printed rate from 512 tokens over the printed time"
    yield finding("eesd.rate_deviation", 100 * worst, "%", "supports", text, *DETAILED)


def fixed_k_baselines() -> Iterator[Finding]:
    """Table 5's fixed K, compared with the detailed tables."""
    for row in read_table("eesd_5").rows:
        if row["speedup_fixed_k"]:
            drafter = "self" if row["method"] == "Self SD" else "LLaMA-2-7B"
            detailed = find_run(row["dataset"], row["target"], row["method"], drafter).row
            agrees = detailed["speedup"] == row["speedup_fixed_k"]
            name = f"eesd.table5_fixed_k.{slug(row['dataset'], row['target'], row['method'])}"
            text = f"table 5 prints {row['speedup_fixed_k']}, {detailed.table.place} {detailed['speedup']}"
            places = (row.place("speedup_fixed_k"), detailed.place("speedup"))
            yield finding(name, row.number("speedup_fixed_k"), "x", agrees, text, *places, flaw="F2")


def vicuna_baselines() -> Iterator[Finding]:
    """Baseline time that each speedup of Vicuna-13B on XSum needs."""
    own, other = (
        read_table("eesd_11").row(target, AUTOREGRESSIVE).number("time_s") for target in ("Vicuna-13B", "LLaMA-2-13B")
    )
    for run in runs():
        if (run.dataset, run.target) == ("xsum", "Vicuna-13B"):
            value, needed = recompute(lambda a, b: a * b, *run.cells("speedup", "time_s"))
            is_own = needed.low <= own <= needed.high
            whose = "its own" if is_own else "LLaMA-2-13B's" if needed.low <= other <= needed.high else "neither's"
            name = f"eesd.vicuna_baseline.{slug(run.arm)}"
            text = f"the autoregressive time that the speedup needs is {whose}; printed {own}"
            place = run.row.place("speedup")
            yield finding(name, value, "s", is_own, text, place, within=needed, flaw="F4")


def shared_baseline() -> Finding:
    """The same autoregressive row for two models and data sets."""
    vicuna = read_table("eesd_11").row("Vicuna-13B", AUTOREGRESSIVE)
    code = read_table("eesd_12").row("CodeLLaMA-2-13B", AUTOREGRESSIVE)
    shared = all(vicuna[column] == code[column] for column in ("time_s", "tokens_per_s"))
    verdict: Verdict = "cannot decide" if shared else "supports"
    text = "Vicuna-13B on XSum and CodeLLaMA on Humaneval print the same autoregressive time and rate"
    places = (vicuna.place("time_s"), code.place("time_s"))
    return finding("eesd.shared_baseline", vicuna.number("time_s"), "s", verdict, text, *places, erratum="F5")


def mirrored_row() -> Iterator[Finding]:
    """v_d and r_d that the printed HM and a full draft need in a row that contradicts itself."""
    run, on_gsm8k = (find_run(dataset, *MIRRORED) for dataset in ("xsum", "gsm8k"))
    hm, longest = run.hm_percent / 100, stated("eesd", "vanilla_and_self_draft_tokens").number("value")
    v_d = hm * (1 + longest) / (longest * (2 - hm))  # r = K v / (K v + 1) in HM (v + r) = 2 v r
    r_d = longest * v_d / (longest * v_d + 1)
    of_pair = f"T_d / T_t of that pair; {on_gsm8k.cost_ratio:.3f} on Gsm8k, {run.cost_ratio:.3f} of the printed pair"
    for name, value, text in (
        ("v_d", v_d, "v_d that HM and ten drafts a round need"),
        ("r_d", r_d, "r_d that HM and ten drafts a round need"),
        ("cost_ratio", implied_cost_ratio(v_d, r_d, run.speedup), of_pair),
    ):
        yield finding(f"eesd.mirrored.{name}", value, "", "cannot decide", text, run.row.place(), erratum="F3")


def head_weights(model: Architecture) -> int:
    return model.hidden_size * model.vocab_size


def weights() -> Iterator[Finding]:
    """Parameter counts from LLaMA-2's shapes, in billions, compared with those printed."""
    table1, table2, table3, table6 = (read_table(f"eesd_{number}") for number in (1, 2, 3, 6))
    printed: list[tuple[str, float, Row, str, str]] = []  # name, parameters, cell by row and column, its part
    for size, shape in TARGETS.items():
        target, layers = f"LLaMA-2-{size}", stated("eesd", f"first_layers_{size.lower()}").number("value")
        model = find_architecture(shape)
        head, layer, square = head_weights(model), model.first(1).stack_parameters, model.hidden_size**2
        cali = table1.row(target, "EESD (+Cali-TS)", "self", "gsm8k")
        exits, matrices = cali["trainable_params"].split("+")
        medusa, loaded = table1.row(target, "Medusa", "self", "gsm8k"), table6.row(size, "EESD")
        printed += [
            (f"{size}.early_exit", layer + head, cali, "trainable_params", exits),
            (f"{size}.loaded", (layers + 1) * layer + 2 * head, loaded, "loaded_params", loaded["loaded_params"]),
            (f"{size}.medusa_heads", 4 * (square + head), medusa, "trainable_params", medusa["trainable_params"]),
            (f"{size}.predictor", 10 * square, cali, "trainable_params", matrices),
        ]
    model = find_architecture(TARGETS["13B"])
    for table, target, words in (
        (table3, "Vicuna-13B", model.vocab_size),
        (table2, "CodeLLaMA-2-13B", CODE_VOCABULARY),
    ):
        heads, row = 4 * model.hidden_size * (model.hidden_size + words), table.row(target, "Medusa")
        printed.append((f"{slug(target)}.medusa_heads", heads, row, "trainable_params", row["trainable_params"]))
    for name, count, row, column, cell in printed:
        scale = {"B": 1e9, "M": 1e6}[cell[-1]]
        agrees = rounded_to(cell[:-1]).contains(count / scale)
        is_loaded = name.endswith("loaded")  # the paper does not say what is loaded
        verdict: Verdict | bool = agrees or ("cannot decide" if is_loaded else False)
        text = f"{count / scale:.4g}{cell[-1]} by the model's shapes, printed {cell}"
        full, flaw = f"eesd.weights.{name.lower()}", "F23" if is_loaded else "F12"
        yield finding(full, count / 1e9, "B", verdict, text, row.place(column), flaw=flaw)
