"""Tables of the documentation that are read off recorded runs: `python -m docs.tables` writes them where they stand.

So it does the numbers in sentences, which docs/values.py has.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs import pages, values
from docs.pages import HOME, ROOT
from specsim.io.settings import fields_of, from_options
from studies.comparisons import first_best
from studies.drafters.report import with_own_interval
from studies.papers.findings import audit
from studies.papers.tables import read_table

STUDIES = ROOT / "studies"
PLACE = re.compile(r"<!-- table: (?P<name>[^\n]+?) -->.*?<!-- end of table -->", re.DOTALL)


def _read(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((STUDIES / path).read_text())
    return document


def _interval(value: dict[str, float]) -> str:
    return f"{value['estimate']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _table(head: str, rows: list[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + "---|" * columns, *(f"| {row} |" for row in rows)])


def best_forms(rows: list[dict[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """Select, for each value of the key, the row that was best on the tuning prompts; sort by held-out speedup."""
    best = [first_best(row for row in rows if row[key] == name) for name in {row[key] for row in rows}]
    return sorted(filter(None, best), key=lambda row: -row["measured"]["estimate"])


def policies() -> str:
    """The best form of every policy, of those that the study of policies really decoded, greedily."""
    document = _read("policies/recorded/greedy/replayed.json")
    best = [
        f"`{row['policy']}` | {_interval(row['predicted'])} | {_interval(row['measured'])}"
        for row in best_forms(document["rows"], "policy")
    ]
    return _table("policy | from the run's own rounds | measured", best)


def stop_signals() -> str:
    """Share of the gap between the best fixed K and the oracle that every stop signal closes, by drafter."""
    cells: dict[str, dict[str, str]] = {}
    for row in _read("policies/recorded/signals.json")["rows"]:
        low, share, high = (100 * row["gap_to_oracle_closed"][key] for key in ("low", "estimate", "high"))
        area = f"; {row['roc_area']:.2f}" if "roc_area" in row else ""
        closed = f"{share:.0f} % [{low:.0f}, {high:.0f}]{area}"
        drafter = row["run"].removeprefix("stop signals: ")
        if row["decision_us"]:
            cells.setdefault(row["form"], {"us": f"{row['decision_us']:.0f}"})[drafter] = closed
        else:  # the best fixed K and the oracle, whose shares are 0 and 100 %
            cells.setdefault(f"speedup, {row['form']}", {})[drafter] = _interval(row["predicted"])
    drafters = list(next(iter(cells.values())))
    rows = [" | ".join([form, *(cell.get(key, "") for key in [*drafters, "us"])]) for form, cell in cells.items()]
    return _table(f"signal: rule | {' | '.join(drafters)} | decision, \u00b5s", rows)


def folded_predictor() -> str:
    """EESD's table 8, and what Cali-TS would take with its predictor folded.

    What its sampling takes beyond Beta-TS's is the predictor's, and is charged by the numbers that it reads.
    """
    from realrun.decode.acceptance_predictor import MAX_MATRICES

    widths = {"LLaMA-2-70B": 8192, "LLaMA-2-13B": 5120}
    rows = []
    for target, width in widths.items():
        beta, cali = (
            {unit: row.number(unit) for unit in row.table.units}
            for row in (read_table("eesd_8").row(target, f"EESD (+{name}-TS)") for name in ("Beta", "Cali"))
        )
        read = (MAX_MATRICES * width + width + MAX_MATRICES) / (MAX_MATRICES * width**2)
        folded = cali | {"sampling_s": beta["sampling_s"] + (cali["sampling_s"] - beta["sampling_s"]) * read}
        for name, parts in {"Beta-TS": beta, "Cali-TS": cali, "Cali-TS, folded": folded}.items():
            total_s = sum(parts.values())
            gain = sum(beta.values()) / total_s
            rows.append(f"{target} | {name} | {parts['sampling_s']:.3f} | {total_s:.3f} | {gain:.3f}")
    return _table("target | control | sampling, s | all, s | speed, Beta-TS = 1", rows)


def drafters() -> str:
    """The best policy of every drafter of the study of drafters, greedily."""
    document = _read("drafters/recorded/board.json")
    best = [
        f"`{row['drafter']}` | `{row['policy']}` | {_interval(row['forecast'])} | {_interval(row['measured'])}"
        for row in best_forms([with_own_interval(row, document) for row in document["rows"]], "drafter")
    ]
    return _table("drafter | its best policy | forecast | measured", best)


def _settings(rows: list[dict[str, Any]]) -> str:
    """All settings of an engine's check in few words."""
    plain = [str(row["k"]) for row in rows if not row["p_min"] and not row["schedule"]]
    sure = [f"{row['p_min']:g}" for row in rows if row["p_min"]]
    said = [f"K = {', '.join(plain)}"] if plain else []
    said += [f"p_min = {', '.join(sure)} with K = {rows[-1]['k']}"] if sure else []
    return "; ".join(said + [row["setting"] for row in rows if row["schedule"]])


def engine_checks() -> str:
    """How many rounds of engines that really ran are the replay's, by the recorded checks."""
    rows = []
    for path in sorted((HOME / "recorded" / "engines").glob("*.json")):
        document = json.loads(path.read_text())
        settings = document["settings"]
        rounds, identical = (sum(row[key] for row in settings) for key in ("rounds", "rounds_identical"))
        cells = [
            f"{document['engine']} {document['version']}",
            "prompt lookup" if document["drafter"] == "prompt lookup" else "draft model",
            _settings(settings),
            str(document["prompts"]["count"]),
            f"{rounds:,}",
            f"{identical:,}",
        ]
        rows.append(" | ".join(cells))
    return _table("engine | drafts by | settings | prompts | rounds | identical in the replay", rows)


def lossless_checks() -> str:
    """Compare the samples of engines that really ran with the target's distribution, by the recorded checks."""
    rows = []
    for path in sorted((HOME / "recorded" / "lossless").glob("*.json")):
        document = json.loads(path.read_text())
        for row in document["settings"]:
            text, drafts = row["text"], row["acceptance"]
            cells = [
                f"{document['engine']} {document['version']}",
                "prompt lookup" if document["drafter"] == "prompt lookup" else "draft model",
                f"{document['temperature']:g}",
                row["setting"],
                f"{text['count']:,}",
                f"{text['z']:+.1f}",
                f"{drafts['measured']:.1%}".replace("%", " %"),
                f"{drafts['expected']:.1%}".replace("%", " %"),
                f"{drafts['z']:+.1f}",
            ]
            rows.append(" | ".join(cells))
    columns = "engine | drafts by | temperature | setting | tokens | z | accepted | expected | z of acceptance"
    return _table(columns, rows)


def drafter_check() -> str:
    """Compare an EAGLE drafter's proposals in several runs of vLLM, by the recorded check."""
    document = json.loads((HOME / "recorded" / "drafter_check.json").read_text())
    rows = []
    for row in document["checks"]:
        differing, gap = row["total"] - row["equal"], row.get("largest_prob_difference")
        cells = (row["check"], f"{row['total']:,} {row['unit']}", f"{differing:,}", str(row.get("other_tokens", "")))
        rows.append(" | ".join([*cells, "" if gap is None else f"{gap:.1g}"]))
    return _table("comparison | of | differ | of them in drafted tokens | largest difference of a probability", rows)


def import_formats() -> str:
    """List the formats that `specsim import` reads, and the real files that each reader was tested on."""
    from specsim.engines.formats.registry import FORMATS, UNTESTED

    rows = [f"`{kind}` | {format_.doc} | {format_.tested or UNTESTED}" for kind, format_ in FORMATS.items()]
    return _table("kind | what it reads | tested on", rows)


def acceptance_rules() -> str:
    """The rule by which each engine accepts drafts at a temperature."""
    from specsim.engines.acceptance_rules import RULES

    rows = [
        f"`{row.name}` | {row.version} | {row.setting or 'default'} | {row.rule or 'none'}" for row in RULES.values()
    ]
    return _table("`--accept` | seen in | setting | rule", rows)


def llama_eagle3() -> str:
    """Published speedups of Llama-3.1-8B with EAGLE-3 on an H100, and what costs from data sheets predict of them."""
    from specsim.cost.calibrate import data_sheet_document
    from specsim.cost.files import read_cost
    from studies.published.cases import CONTEXT, LIKE, read_csv

    cost = read_cost(data_sheet_document("h100", "llama-3.1-8b", "eagle3", engine="vllm@2025-03"))
    rows = []
    for run in read_csv("speculation.csv"):
        if run["source"] != LIKE or run["drafter"] != "eagle3":
            continue
        k, tau, measured = int(run["steps"]), float(run["acceptance"]), float(run["speedup"])
        round_s = cost.draft(k, CONTEXT) + cost.verify(k + 1, CONTEXT) + cost.round_overhead()
        predicted = tau * float(cost.autoregressive_step(CONTEXT) / round_s)
        rows.append(f"{k} | {tau:.2f} | {measured:.2f} | {predicted:.2f} | {100 * (predicted / measured - 1):+.0f} %")
    return _table("K | mean acceptance length, published | speedup, published | predicted | error", rows)


def smollm2() -> str:
    """The policy that the forecast chose for each drafter of SmolLM2, as forecast and as measured."""
    rows = []
    for drafter in ("eagle", "prompt-lookup"):
        document = _read(f"smollm2/recorded/{drafter}/validation.json")
        (row,) = [row for row in document["rows"] if row["label"] == document["choice"]["forecast"]]
        speedups = f"{_interval(row['forecast'])} | {_interval(row['measured'])}"
        rows.append(f"{drafter} | `{row['policy']}` | {document['sequences']['holdout']} | {speedups}")
    return _table("drafter | policy chosen by the forecast | held-out prompts | forecast | measured", rows)


def recipes() -> str:
    """What the papers print for their trainings, beside the defaults and the study of drafters on SmolLM2."""
    from realrun.train.registry import TRAININGS

    study = tomllib.loads((STUDIES / "drafters" / "config.toml").read_text())
    shared = shlex.split(study["train"]["shared"])
    lines = [shlex.split(drafter["train"]) for drafter in study["drafters"].values() if "train" in drafter]
    trained = {name: [*options, *shared] for name, *options in lines}
    rows = []
    for training in TRAININGS:
        for title, chosen in VARIANTS.get(training.name, {training.name: {}}).items():
            if training.printed is None:
                continue
            default = _values(training, chosen)
            studied = training.name in trained and not chosen
            smollm2 = _values(training, chosen, trained[training.name]) if studied else {}
            for name, printed in training.printed(**chosen).items():
                cells = [_cell(name, values) for values in ({name: printed}, default, smollm2)]
                rows.append(f"{title} | `{name}` | {' | '.join(cells)}")
    return _table("training | setting | printed | default | SmolLM2", rows)


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "medusa": {
        "medusa": {},
        "medusa --joint --backbone-loss text": {"joint": True, "backbone_loss": "text"},
        "medusa --joint": {"joint": True, "backbone_loss": "distill"},
    }
}


def _values(training: Any, chosen: Mapping[str, Any], line: Sequence[str] = ()) -> dict[str, Any]:
    """All settings of a training by name, with these options and those of a command line."""
    words = {flag[2:].replace("-", "_"): text for flag, text in zip(line[::2], line[1::2], strict=True)}
    named = {option.name: option for kind in (training.settings, training.shared) for option in fields_of(kind)}
    given = {name: named[name].kind(text) for name, text in words.items() if name in named}
    values: dict[str, Any] = {}
    for kind in (training.shared, training.settings):
        values |= vars(from_options(kind, {**training.defaults, **chosen, **given}))
    return values | (vars(from_options(training.settings, chosen).second) if chosen else {}) | chosen


def _cell(name: str, values: Mapping[str, Any]) -> str:
    """A setting as it is typed; passes over the text that nobody asked for are told in tokens."""
    value = values.get(name, "-")
    if name == "epochs" and value is None:
        return f"{values['tokens']:g} million tokens"
    if name == "warmup" and value is None:
        return "a tenth of the steps, 10 to 40"
    if isinstance(value, tuple):
        return ", ".join(f"{number:g}" for number in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def printed_errors() -> str:
    """List the papers' printed figures that contradict others, by case of the errata and cell."""
    texts: dict[tuple[int, str], list[str]] = {}
    for finding in audit().findings.values():
        if finding.erratum.startswith("F"):
            texts.setdefault((int(finding.erratum[1:]), finding.cell), []).append(finding.text)
    use = audit().use
    rows = [
        f"F{case} | {cell} | {'; '.join(of_cell)} | {use[f'F{case}']}"
        for (case, cell), of_cell in sorted(texts.items())
    ]
    return _table("case | table: row: column | finding | use", rows)


FINDINGS = ROOT / "findings"
FIELDS = ("engine", "version", "date", "finding")  # of a script's header, each `# name: ...`, wrapped lines indented


def finding_header(path: Path) -> dict[str, str]:
    """The fields in the comments at a script's head."""
    head = path.read_text().partition("\nset -eu\n")[0]
    fields = re.findall(r"^# (\w+): (.*(?:\n#   .*)*)", head, re.MULTILINE)
    return {name: re.sub(r"\n#   ", " ", text) for name, text in fields}


def findings() -> str:
    """What surprised in engines and benchmarks, by the headers of the scripts that show it."""
    headers = {path.name: finding_header(path) for path in sorted(FINDINGS.glob("*.sh"))}
    rows = [
        f"{header['engine']} {header['version']}, {header['date']} | {header['finding']} | `{Path(name).stem}`"
        for name, header in sorted(headers.items(), key=lambda item: (item[1]["engine"].lower(), item[0]))
    ]
    return _table("software, seen on | finding | script", rows)


TABLES: dict[str, Callable[[], str]] = {
    "policies": policies,
    "stop signals": stop_signals,
    "folded predictor": folded_predictor,
    "drafters": drafters,
    "engine checks": engine_checks,
    "lossless checks": lossless_checks,
    "drafter check": drafter_check,
    "import formats": import_formats,
    "acceptance rules": acceptance_rules,
    "llama-3.1-8b with eagle3": llama_eagle3,
    "smollm2": smollm2,
    "printed errors": printed_errors,
    "recipes": recipes,
    "findings": findings,
}


def written(text: str) -> str:
    """A page with its tables and values as the recorded runs have them."""
    text = PLACE.sub(
        lambda match: f"<!-- table: {match['name']} -->\n\n{TABLES[match['name']]()}\n\n<!-- end of table -->", text
    )
    return values.written(text)


def written_pages() -> list[Path]:
    """The pages with such tables and values."""
    found = [(path, path.read_text()) for path in pages.written()]
    return [path for path, text in found if PLACE.search(text) or values.PLACE.search(text)]


if __name__ == "__main__":
    for page in written_pages():
        page.write_text(written(page.read_text()))
