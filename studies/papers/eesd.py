"""EESD: do tables 1 to 3, 5 and 10 to 13 agree with their own arithmetic?"""

from __future__ import annotations

from collections.abc import Iterator

from specsim.cost.roofline.architecture import Architecture, find_architecture
from specsim.speedup.formulas import harmonic_mean
from studies.papers.eesd_runs import DETAILED, Run, implied_cost_ratio, output_tokens, run, runs
from studies.papers.record import Finding, finding, slug
from studies.papers.tables import Interval, Row, image, read_table, rounded_to, stated

SUMMARIES = {"gsm8k": "eesd_1", "xsum": "eesd_1", "humaneval": "eesd_2", "mt_bench": "eesd_3"}
VICUNA_XSUM = ("xsum", "Vicuna-13B")
MIRRORED = ("xsum", "LLaMA-2-70B-chat", "Vanilla SD")  # its v_d and r_d are those of the row below, exchanged
TARGETS = {"70B": "llama-2-70b", "13B": "llama-2-13b"}  # of whose shapes all targets are
CODE_VOCABULARY = 32016  # of CodeLLaMA


def audit() -> Iterator[Finding]:
    """All findings of this file."""
    for one in runs():
        yield harmonic(one)
        yield from speedups(one)
        yield summary(one)
    yield from rates()
    yield from fixed_k_baselines()
    yield from vicuna_baselines()
    yield shared_baseline()
    yield from mirrored_row()
    yield from weights()


def percent_hm(v_d: float, r_d: float) -> float:
    return 100 * float(harmonic_mean(v_d, r_d))


def harmonic(one: Run) -> Finding:
    """HM from v_d and r_d."""
    allowed = image(percent_hm, *one.intervals("v_d", "r_d"))
    agrees = allowed.meets(one.row.interval("hm_percent"))
    return finding(
        f"eesd.hm.{one.slug}",
        percent_hm(one.v_d, one.r_d),
        "%",
        agrees,
        f"v_d {one.row['v_d']} and r_d {one.row['r_d']} allow HM {allowed.low:.2f} to {allowed.high:.2f}; printed "
        f"{one.row['hm_percent']}",
        one.row.place("hm_percent"),
        within=allowed,
        erratum="" if agrees else "F3",
    )


def speedups(one: Run) -> Iterator[Finding]:
    """Speedup from times and from rates."""
    for name, words, above, below in (
        ("time_ratio", "times", one.baseline, one.row),
        ("rate_ratio", "rates", one.row, one.baseline),
    ):
        column = "time_s" if name == "time_ratio" else "tokens_per_s"
        allowed = image(lambda a, b: a / b, above.interval(column), below.interval(column))
        ratio = above.number(column) / below.number(column)
        agrees = allowed.meets(one.row.interval("speedup"))
        yield finding(
            f"eesd.{name}.{one.slug}",
            ratio,
            "x",
            agrees,
            f"{words} give {ratio:.3f}, printed {one.row['speedup']}",
            one.row.place("speedup"),
            within=allowed,
            erratum="" if agrees else "F4",
        )


def summary(one: Run) -> Finding:
    """The speedup of the detailed table in tables 1 to 3."""
    table = read_table(SUMMARIES[one.dataset])
    rows = [row for row in table.rows if _same(row, one)]
    assert len(rows) == 1
    agrees = rows[0]["speedup"] == one.row["speedup"] and rows[0]["hm_percent"] == one.row["hm_percent"]
    return finding(
        f"eesd.summary.{one.slug}",
        rows[0].number("speedup"),
        "x",
        agrees,
        f"{table.place} prints {rows[0]['speedup']}, {one.row.table.place} {one.row['speedup']}",
        rows[0].place("speedup"),
        one.row.place("speedup"),
        erratum="" if agrees else {"gsm8k": "F1", "xsum": "F2"}[one.dataset],
    )


def _same(row: Row, one: Run) -> bool:
    """Whether a row of tables 1 to 3 is this run's."""
    cells = {"target": one.target, "method": one.method, "drafter": one.row["drafter"], "dataset": one.dataset}
    return all(row[key] == cells[key] for key in row.table.keys)


def rates() -> Iterator[Finding]:
    """Tokens per second times time is 512 tokens, the baselines' too."""
    worst, tokens = 0.0, output_tokens()
    for table, dataset in DETAILED.items():
        for row in read_table(table).rows:
            rate = tokens / row.number("time_s")
            worst = max(worst, abs(rate / row.number("tokens_per_s") - 1))
            allowed = image(lambda time_s: tokens / time_s, row.interval("time_s"))
            agrees = allowed.meets(row.interval("tokens_per_s"))
            yield finding(
                f"eesd.rate.{slug(dataset, *(row[key] for key in row.table.keys))}",
                rate,
                "tokens/s",
                agrees,
                f"{tokens:.0f} tokens in {row['time_s']} s are {rate:.2f}, printed {row['tokens_per_s']}",
                row.place("tokens_per_s"),
                within=allowed,
                erratum="" if agrees else "F6",
            )
    yield finding(
        "eesd.rate_deviation",
        100 * worst,
        "%",
        "supports",
        "the largest deviation of a printed rate from 512 tokens over the printed time",
        *DETAILED,
    )


def fixed_k_baselines() -> Iterator[Finding]:
    """Table 5's fixed K beside the detailed tables."""
    for row in read_table("eesd_5").rows:
        if row["speedup_fixed_k"]:
            drafter = "self" if row["method"] == "Self SD" else "LLaMA-2-7B"
            detailed = run(row["dataset"], row["target"], row["method"], drafter).row
            agrees = detailed["speedup"] == row["speedup_fixed_k"]
            yield finding(
                f"eesd.table5_fixed_k.{slug(row['dataset'], row['target'], row['method'])}",
                row.number("speedup_fixed_k"),
                "x",
                agrees,
                f"table 5 prints {row['speedup_fixed_k']}, {detailed.table.place} {detailed['speedup']}",
                row.place("speedup_fixed_k"),
                detailed.place("speedup"),
                erratum="" if agrees else "F2",
            )


def vicuna_baselines() -> Iterator[Finding]:
    """The baseline's time that each speedup of Vicuna-13B on XSum needs."""
    own = read_table("eesd_11").row("Vicuna-13B", "Auto-regressive").number("time_s")
    other = read_table("eesd_11").row("LLaMA-2-13B", "Auto-regressive").number("time_s")
    for one in runs():
        if (one.dataset, one.target) == VICUNA_XSUM:
            needed = image(lambda a, b: a * b, *one.intervals("speedup", "time_s"))
            is_own = needed.low <= own <= needed.high
            of = "LLaMA-2-13B's" if needed.low <= other <= needed.high else "neither's"
            yield finding(
                f"eesd.vicuna_baseline.{slug(one.arm)}",
                one.speedup * one.time_s,
                "s",
                is_own,
                f"the autoregressive time that the speedup needs is {'its own' if is_own else of}; printed {own}",
                one.row.place("speedup"),
                within=needed,
                erratum="" if is_own else "F4",
            )


def shared_baseline() -> Finding:
    """One autoregressive row for two models and data sets."""
    rows = [
        read_table("eesd_11").row("Vicuna-13B", "Auto-regressive"),
        read_table("eesd_12").row("CodeLLaMA-2-13B", "Auto-regressive"),
    ]
    shared = rows[0]["time_s"] == rows[1]["time_s"] and rows[0]["tokens_per_s"] == rows[1]["tokens_per_s"]
    return finding(
        "eesd.shared_baseline",
        rows[0].number("time_s"),
        "s",
        "cannot decide" if shared else "supports",
        "Vicuna-13B on XSum and CodeLLaMA on Humaneval print the same autoregressive time and rate",
        *(row.place("time_s") for row in rows),
        erratum="F5",
    )


def mirrored_row() -> Iterator[Finding]:
    """v_d and r_d that the printed HM and a full draft would need where they contradict each other."""
    one = run(*MIRRORED, "LLaMA-2-7B-chat")
    hm, longest = one.hm_percent / 100, stated("eesd", "vanilla_and_self_draft_tokens").number("value")
    v_d = hm * (1 + longest) / (longest * (2 - hm))  # r = K v / (K v + 1) in HM (v + r) = 2 v r
    r_d = longest * v_d / (longest * v_d + 1)
    beside = run("gsm8k", one.target, one.method, "LLaMA-2-7B-chat")
    figures = {
        "v_d": (v_d, "v_d that HM and ten drafts a round need"),
        "r_d": (r_d, "r_d that HM and ten drafts a round need"),
        "cost_ratio": (
            implied_cost_ratio(v_d, r_d, one.speedup),
            f"T_d / T_t of that pair; {implied_cost_ratio(beside.v_d, beside.r_d, beside.speedup):.3f} on Gsm8k, "
            f"{implied_cost_ratio(one.v_d, one.r_d, one.speedup):.3f} of the printed pair",
        ),
    }
    for name, (value, text) in figures.items():
        yield finding(f"eesd.mirrored.{name}", value, "", "cannot decide", text, one.row.place(), erratum="F3")


def head_weights(model: Architecture) -> int:
    return model.hidden_size * model.vocab_size


def weights() -> Iterator[Finding]:
    """Parameter counts from LLaMA-2's shapes, in billions, beside the printed ones."""
    table1, table3, table6 = read_table("eesd_1"), read_table("eesd_3"), read_table("eesd_6")
    printed: list[tuple[str, float, Row, str, str]] = []
    for size, shape in TARGETS.items():
        target, layers = f"LLaMA-2-{size}", stated("eesd", f"first_layers_{size.lower()}")
        model = find_architecture(shape)
        head, layer, square = head_weights(model), model.first(1).stack_parameters, model.hidden_size**2
        cali = table1.row(target, "EESD (+Cali-TS)", "self", "gsm8k")
        exits, matrices = cali["trainable_params"].split("+")
        loaded = (layers.number("value") + 1) * layer + 2 * head
        medusa = table1.row(target, "Medusa", "self", "gsm8k")
        row6 = table6.row(size, "EESD")
        printed += [
            (f"{size}.early_exit", layer + head, cali, "trainable_params", exits),
            (f"{size}.loaded", loaded, row6, "loaded_params", row6["loaded_params"]),
            (f"{size}.medusa_heads", 4 * (square + head), medusa, "trainable_params", medusa["trainable_params"]),
            (f"{size}.predictor", 10 * square, cali, "trainable_params", matrices),
        ]
    model = find_architecture(TARGETS["13B"])
    for target, words, row in (
        ("Vicuna-13B", model.vocab_size, table3.row("Vicuna-13B", "Medusa")),
        ("CodeLLaMA-2-13B", CODE_VOCABULARY, read_table("eesd_2").row("CodeLLaMA-2-13B", "Medusa")),
    ):
        heads = 4 * model.hidden_size * (model.hidden_size + words)
        printed.append((f"{slug(target)}.medusa_heads", heads, row, "trainable_params", row["trainable_params"]))
    for name, count, row, column, text in printed:
        scale = {"B": 1e9, "M": 1e6}[text[-1]]
        agrees = rounded_to(text[:-1]).meets(Interval(count / scale, count / scale))
        yield finding(
            f"eesd.weights.{name.lower()}",
            count / 1e9,
            "B",
            agrees or ("cannot decide" if name.endswith("loaded") else False),  # what is loaded is not said
            f"{count / scale:.4g}{text[-1]} by the model's shapes, printed {text}",
            row.place(column),
            erratum="" if agrees else "F23" if name.endswith("loaded") else "F12",
        )
