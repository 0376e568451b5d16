"""The papers' tables as shipped: their cells, and the digests that name one that was changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from specsim.errors import InputError
from studies.papers import tables
from studies.papers.tables import PAPERS, changed_cells, parse_table, read_table, table_names
from tests.support.commands import call


def test_every_printed_number_is_there() -> None:
    numbers = dict.fromkeys(PAPERS, 0)
    for name in table_names():
        table = read_table(name)
        if table.place != "text":
            cells = [row[column] for row in table.rows for column in table.units]
            numbers[table.paper] += sum(bool(re.match(r"[+-]?\d", cell)) for cell in cells)
    assert numbers == {"eesd": 793, "edd": 406, "space": 281, "adaedl": 36, "medusa": 22}
    assert len(table_names()) == 31


def test_some_cells_are_those_of_the_papers() -> None:
    assert read_table("eesd_11").row("Vicuna-13B", "Medusa")["speedup"] == "1.21"
    assert read_table("eesd_4").row("w/o TS, K = 10", "xsum")["hm_percent"] == "41.77"
    assert read_table("edd_2").row("Vicuna1.5-13B", "PCT", "cnn_dm")["tau"] == "2.84"
    assert read_table("edd_costs").row("13B").interval("target_ms") == pytest.approx((50.05, 50.15))
    assert read_table("space_5").row("Falcon-40B", "xsum")["quality_baseline_spread"] == "0.3"
    assert read_table("adaedl_1").row("16", "Base-SPD")["wmt_19"] == "22.30"
    assert read_table("medusa_2").row("Direct Fine-tuning")["quality"] == "5.925"


@pytest.mark.parametrize("name", table_names())
def test_a_changed_cell_is_named_by_table_row_and_column(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = read_table(name)
    assert changed_cells(table) == []
    row, column = table.rows[len(table.rows) // 2], next(iter(table.units))
    before = dict(row.cells)
    lines = [{**line, column: line[column] + "1"} if line == before else line for line in table.lines]
    shutil.copytree(tables.DATA, tmp_path / "data")
    text = "\n".join(",".join(f'"{line[key]}"' for key in table.columns) for line in lines)
    (tmp_path / "data" / f"{name}.csv").write_text(",".join(table.columns) + "\n" + text + "\n")
    monkeypatch.setattr(tables, "DATA", tmp_path / "data")
    read_table.cache_clear()
    try:
        with pytest.raises(InputError) as error:
            read_table(name)
    finally:
        monkeypatch.undo()
        read_table.cache_clear()
    expected = f"table {name}, row {row.label}, column {column}"
    assert str(error.value) == f"{expected}: not as transcribed from the paper; check out the file anew"


def test_rows_that_come_or_go_are_named() -> None:
    text = (tables.DATA / "medusa_1.csv").read_text()
    gone = parse_table("medusa_1", text.replace("Zephyr-7B", "Zephyr-8B"))
    assert changed_cells(gone) == [
        "table medusa_1, row Zephyr-7B is missing",
        "table medusa_1, row Zephyr-8B is new",
    ]


def test_a_table_is_printed_as_transcribed() -> None:
    printed = call("papers", "table", "medusa_1")
    assert printed.code == 0 and all(
        cell in printed.out for cell in ("MEDUSA", "table 1", "Vicuna-33B", "1.27", "+0.05")
    )
    wrong = call("papers", "table", "medusa_9")
    assert wrong.code == 2 and wrong.err.startswith("error: there is no table medusa_9; choose of eesd_1, eesd_2")
