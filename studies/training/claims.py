"""What the figures of the report on training are evaluated from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from studies.claims import HOME, recorded
from studies.printed import Figure

Subject = dict[str, Any]
MEANS = {"tau": ("tokens", "rounds"), "speedup": ("baseline_s", "seconds")}  # a ratio of sums for each seed
SHARES = {  # of sums over seeds and prompts
    "v_d": (["accepted"], ["drafted"]),
    "r_d": (["accepted"], ["tokens"]),
    "HM": (["accepted"], ["drafted", "tokens"]),  # half of it, as 2 / (1 / v_d + 1 / r_d) = 2 a / (d + t)
    "rounds truncated %": (["truncated"], ["rounds"]),
}
FACTS = {"trained parameters": "parameters", "tokens seen, M": "tokens"}
WHOLE, EESD, EAGLE, LAB_HEAD = "EDD + PCT", "EESD, Beta-TS", "EAGLE", "the lab's head"
FURTHER = "trained further, "


def not_claimed(figure: Figure) -> str:
    if figure.column == "the paper's speedup":
        return "the paper's table 3, which the study's tests compare with specsim/papers"
    return ""


def unit(figure: Figure) -> tuple[float, float]:
    """A head that was trained further has seen the lab's tokens as well."""
    if figure.column == "tokens seen, M":
        return 1e6, document("heads")["shipped_tokens"] if figure.row.get("head", LAB_HEAD) != LAB_HEAD else 0.0
    return {"rounds truncated %": 0.01, "HM": 0.5}.get(figure.column, 1.0), 0.0


def subjects(results: Path) -> Callable[[Figure], Subject]:
    return subject


def subject(figure: Figure) -> Subject:
    section = figure.section.partition(" / ")[0]
    (found,) = (of for title, of in SECTIONS.items() if section.startswith(title))
    return found(figure)


def of_decoders(figure: Figure) -> Subject:
    row, column = figure.row, figure.column
    if "layers below" in row:
        both = [["sweep", layers, row["policy"]] for layers in (row["layers below"], usual(column))]
        return replayed("decoders", column, *both)
    _, at_costs, *alone = figure.section.split(" / ")
    at = ["tuned" if alone else "ablation", at_costs.removeprefix("At ")]
    return replayed("decoders", column, [*at, row["variant"]], [*at, WHOLE])


def of_exits(figure: Figure) -> Subject:
    row, column = figure.row, figure.column
    if "variant" in row:
        return replayed("exits", column, ["rows", row["variant"]], ["rows", EESD])
    swept = "N" if "N" in row else "E"
    if column == "s_d / s_t":
        return value("exits", ["ratios", swept, row[swept]])
    both = [["sweeps", swept, number, row["policy"]] for number in (row[swept], usual(column))]
    return replayed("exits", column, *both)


def of_sizes(figure: Figure) -> Subject:
    name, column = figure.row["drafter"], figure.column
    if column in FACTS:
        return value("sizes", ["facts", name, FACTS[column]])
    if column == "of EAGLE's":
        both = [{"at": ["facts", one, "parameters"]} for one in (name, EAGLE)]
        return {"document": file("sizes"), "ratio": both}
    less, _, run = column.rpartition("tau, ")
    return replayed("sizes", "tau less EAGLE's" if less else "tau", ["lengths", run, name], ["lengths", run, EAGLE])


def of_heads(figure: Figure) -> Subject:
    name, column = figure.row["head"], figure.column
    if column == "tokens seen, M" and name == LAB_HEAD:
        return value("heads", ["shipped_tokens"])
    if column in FACTS:
        return value("heads", ["forms", name.removeprefix(FURTHER), FACTS[column]])
    against = {"less the lab's": LAB_HEAD, f"less {FURTHER}as it is": f"{FURTHER}as it is"}
    right = {"document": file("heads"), "over": ["places"]}
    if column in against:
        return {**right, "difference": [{"at": correct(one)} for one in (name, against[column])]}
    return {**right, "at": correct(name)}


def correct(head: str) -> list[Any]:
    """The way to the places of each window at which a head agrees; the lab's is what every form was before."""
    if head == LAB_HEAD:
        return ["forms", "as it is", "before", "correct"]
    return ["forms", head.removeprefix(FURTHER), "after", "correct"]


def of_heat(figure: Figure) -> Subject:
    column, at = figure.column, ["tunings", tuning(figure)]
    if column in FACTS:
        return value("heat", [*at, FACTS[column]])
    if column == "cost, nats a token":
        return {"document": file("heat"), "difference": [{"at": [*at, "after", of]} for of in ("tuned", "original")]}
    mask = f"mask_{column.split()[1].removesuffix(',')}_agreement"
    if column.endswith("than before"):
        return {"document": file("heat"), "difference": [{"at": [*at, when, mask]} for when in ("after", "before")]}
    return value("heat", [*at, "after", mask])


def tuning(figure: Figure) -> int:
    """Which of the tunings a line is of, counted from 0."""
    lines = [
        ("all weights" if one["full"] else "adapter", "SFT" if one["plain"] else "SAR-SFT", f"{one['lr']:.1e}")
        for one in (found["tuning"] for found in document("heat")["tunings"])
    ]
    return lines.index(tuple(figure.row[column] for column in ("trained", "tuned by", "learning rate")))


SECTIONS: dict[str, Callable[[Figure], Subject]] = {
    "EDD taken apart": of_decoders,
    "MEDUSA's first head": of_heads,
    "EESD taken apart": of_exits,
    "EDD beside EAGLE": of_sizes,
    "SPACE": of_heat,
}


def usual(column: str) -> str:
    """Of a sweep, what a column such as "tau less that of 5" sets its lines against."""
    return column.rpartition(" ")[2]


def replayed(name: str, column: str, at: list[Any], against: list[Any]) -> Subject:
    """A column of what a policy gave on the traces of all seeds, or of that less what it is set against."""
    quantity, _, less = column.partition(" less ")
    if quantity in SHARES:
        return {"seeds": file(name), "at": at, "ratio": [{"lists": lists} for lists in SHARES[quantity]]}
    top, bottom = MEANS[quantity]
    ways = {"difference": [{"at": at}, {"at": against}]} if less else {"at": at}
    return {"seeds": file(name), **ways, "lists": [top], "over": [bottom]}


def value(name: str, at: list[Any]) -> Subject:
    return {"document": file(name), "at": at}


def file(name: str) -> str:
    return recorded("training", f"{name}.json")


@cache
def document(name: str) -> Any:
    return json.loads((HOME / "training" / "recorded" / f"{name}.json").read_text())
