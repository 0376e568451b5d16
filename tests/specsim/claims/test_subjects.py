"""What claims are of beside replays: full batches, and the parts of a real run's rounds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import specsim
from specsim.claims.check import check_files
from specsim.errors import InputError
from specsim.files import write_table
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import GoodputK
from specsim.serving.speedup_map import speedup_map
from specsim.speedup.intervals import ratio_interval
from tests.specsim.claims.test_check import validation
from tests.specsim.claims.test_files import beside

COST = "specdecode-bench-llama3.1-8b-eagle-h100"
SERVED = f'serving = "trace"\ncost = "{COST}"\nbatch = 3\n'


@pytest.mark.parametrize("context", [None, 512])
def test_full_batches_are_those_of_a_schedule(recorded: Path, tmp_path: Path, context: int | None) -> None:
    trace, cost = specsim.read_trace(recorded / "trace"), batch_cost(specsim.read_cost(COST))
    (cell,) = speedup_map(trace, cost, [FixedK(k=2), GoodputK(cost, 4)], [3], contexts=[context]).cells
    subject = SERVED + ("" if context is None else f"context = {context}\n")
    arms = {
        "fixed": 'policy = "fixed_k"\nsettings = { k = 2 }',
        "goodput": 'policy = "goodput"\nsettings = { max_draft_tokens = 4 }',
    }
    lines = [f'[[claim]]\nname = "{name}"\n{subject}{arm}\nat_least = 0.0' for name, arm in arms.items()]
    found = check_files([beside(recorded, tmp_path, "\n".join(["version = 1", *lines]))])
    assert [one.found for one in found] == list(cell.speedup.values())


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        (SERVED + 'policy = "goodput"', "max_draft_tokens"),
        (SERVED + 'policy = "goodput"\nsettings = { max_draft_tokens = 9 }', "max_draft_tokens"),
        (SERVED + 'policy = "goodput"\nsettings = { k = 2 }', "max_draft_tokens"),
        (SERVED + 'policy = "renewal_stop"', "learns"),
        (SERVED + 'policy = "fixed_l"', "fixed_l"),
        (SERVED.replace(COST, "cost.json") + 'policy = "fixed_k"\nsettings = { k = 2 }', "cost.json"),
        (SERVED.replace("batch = 3", "batch = 0") + 'policy = "fixed_k"', "batch"),
        (SERVED.replace('"trace"', '"none"') + 'policy = "fixed_k"\nsettings = { k = 2 }', "none"),
    ],
)
def test_batches_that_cannot_be_claimed_are_refused(recorded: Path, tmp_path: Path, claim: str, word: str) -> None:
    path = beside(recorded, tmp_path, f'version = 1\n[[claim]]\nname = "it"\n{claim}\nat_least = 0.0')
    with pytest.raises(InputError, match=word) as refused:
        check_files([path])
    assert "\n" not in str(refused.value)


def rounds_of(folder: Path, **changes: object) -> Path:
    """A validation with rounds of K = 2, of sequences 7, 3 and 5 in this order."""
    columns: dict[str, object] = {
        "policy": ["fixed_k(k=2)"] * 4 + ["other"],
        "sequence_id": [7, 7, 3, 5, 7],
        "draft_s": [0.1, 0.2, 0.4, 0.8, 9.0],
        "policy_s": [0.0, 0.0, 0.01, 0.0, 9.0],
        "verify_s": [1.0, 1.0, 1.0, 1.0, 9.0],
        "other_s": [0.0, 0.0, 0.0, 0.05, 9.0],
        "drafted": [2, 1, 2, 0, 9],
        "verified": [2, 0, 1, 0, 9],
    }
    validation(folder)
    write_table(pa.table({**columns, **changes}), folder / "rounds.parquet")
    path = folder / "it.claims.toml"
    head = 'version = 1\n[defaults]\nvalidation = "."\npolicy = "fixed_k(k=2)"\nat_least = 0.0\n'
    parts = ("draft", "policy", "verify", "other")
    names = [*(f"{part}_ms_per_token" for part in parts), "ms_per_token", "mean_drafted_tokens", "mean_verified_tokens"]
    path.write_text(head + "\n".join(f'[[claim]]\nname = "{name}"\nquantity = "{name}"' for name in names))
    return path


def test_milliseconds_of_a_token_and_counts_of_a_round_are_those_of_the_rounds(tmp_path: Path) -> None:
    """Sum over sum of what each sequence took and emitted, whichever way the sequences are numbered."""
    found = {one.claim.name: one.found for one in check_files([rounds_of(tmp_path)])}
    spent_ms = {
        "draft_ms_per_token": [300, 400, 800],
        "policy_ms_per_token": [0, 10, 0],
        "verify_ms_per_token": [2000, 1000, 1000],
        "other_ms_per_token": [0, 0, 50],
        "ms_per_token": [2300, 1410, 1850],
    }
    for name, spent in spent_ms.items():
        wanted, said = ratio_interval(spent, [10, 20, 30]), found[name]
        assert said is not None and said.as_dict() == pytest.approx(wanted.as_dict(), rel=1e-12)
    for name, counted in {"mean_drafted_tokens": [3, 2, 0], "mean_verified_tokens": [2, 1, 0]}.items():
        wanted, said = ratio_interval(counted, [2, 1, 1]), found[name]
        assert said is not None and said.as_dict() == pytest.approx(wanted.as_dict(), rel=1e-12)


def test_rounds_of_another_run_are_refused(tmp_path: Path) -> None:
    path = rounds_of(tmp_path, sequence_id=[7, 7, 3, 3, 7])
    with pytest.raises(InputError, match="rounds of 2 sequences"):
        check_files([path])
    shutil.copy(tmp_path / "validation.json", tmp_path / "rounds.parquet")
    with pytest.raises(InputError, match=r"rounds\.parquet is no readable Parquet file"):
        check_files([path])
    (tmp_path / "rounds.parquet").unlink()
    with pytest.raises(InputError, match=r"rounds\.parquet does not exist"):
        check_files([path])
