"""The papers' tables: their cells, and the digest that refuses an edited file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specsim.io.errors import InputError
from studies.papers import tables
from studies.papers.tables import PAPERS, read_table, table_names


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
    assert read_table("edd_costs").row("13B")["target_ms"] == "50.1"
    assert read_table("space_5").row("Falcon-40B", "xsum")["quality_baseline_spread"] == "0.3"
    assert read_table("adaedl_1").row("16", "Base-SPD")["wmt_19"] == "22.30"
    assert read_table("medusa_2").row("Direct Fine-tuning")["quality"] == "5.925"


@pytest.mark.parametrize("name", ["eesd_11", "medusa_stated"])
def test_an_edited_table_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (tables.DATA / f"{name}.csv").read_text()
    (tmp_path / f"{name}.csv").write_text(text.replace("1", "2", 1))
    monkeypatch.setattr(tables, "DATA", tmp_path)
    read_table.cache_clear()
    with pytest.raises(InputError, match=f"table {name} differs from its transcription; `git diff"):
        read_table(name)


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(InputError, match="unknown table medusa_9; choose one of eesd_1, eesd_2"):
        read_table("medusa_9")
