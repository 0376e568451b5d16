"""Claim files: what is read, what is refused in a single line, what is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specsim.claims.check import check_files
from specsim.claims.files import claim_files, read_claims, update_expected
from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate
from tests.specsim.claims.conftest import CLAIMS, ClaimFile

WRONG = {  # what is changed in a claim file that holds, into what, and the word that the error names
    "version": ("version = 1", "version = 2", "version"),
    "version's type": ("version = 1", "version = true", "version"),
    "file's key": ("version = 1", "version = 1\nclaims = 1", "claims"),
    "no TOML": ("version = 1", "version = = 1", "TOML"),
    "defaults' key": ("[defaults]", "[defaults]\ntraces = 1", "traces"),
    "claim's key": ("settings = { k = 4 }", "setings = { k = 4 }", "setings"),
    "key's type": ("settings = { k = 4 }", 'settings = "k = 4"', "settings"),
    "number's type": ("expected = 2.33", 'expected = "2.33"', "expected"),
    "NaN": ("expected = 2.33", "expected = nan", "expected"),
    "infinity": ("at_least = 0.5", "at_least = inf", "at_least"),
    "negative tolerance": ("tolerance_percent = 0.5", "tolerance_percent = -1.0", "tolerance_percent"),
    "both a value and a bound": ("expected = 2.33", "expected = 2.33\nat_most = 3.0", "exclude"),
    "nothing claimed": ("expected = 2.33", "", "nothing is claimed"),
    "no tolerance": ("tolerance_percent = 0.5", "", "tolerance"),
    "bounds crossed": ("at_least = 0.5", "at_least = 0.5\nat_most = 0.4", "swap"),
    "two subjects": ('policy = "fixed_k"', 'policy = "fixed_k"\ntrace = "trace"\nvalidation = "v"', "exclude"),
    "no subject": ('trace = "trace"', "", "subject"),
    "a key of another subject": ('policy = "fixed_k"', 'policy = "fixed_k"\nat = ["rows"]', "at"),
    "two of a name": ("drafts are accepted", "speedup of four drafts", "rename"),
    "an unknown verdict": ("at_least = 0.5", 'at_least = 0.5\nverdict = "true"', "verdict"),
    "a name of two lines": ("drafts are accepted", "drafts\\nare accepted", "a line"),
    "a source that is no text": ('source = "a table"', 'source = "a\\u0000table"', "a line"),
    "rounds without their quantity": ('policy = "fixed_k"', 'policy = "fixed_k"\nrounds = "r"', "rounds"),
    "identity without rounds": ('"v_d"', '"rounds_identical_percent"', "rounds"),
    "a share of all": ('policy = "fixed_k"', 'policy = "fixed_k"\ntuning_share = 1.0', "tuning_share"),
    "path": ('trace = "trace"', 'trace = "elsewhere"', "elsewhere"),
    "cost path": ("cost = { s_d = 0.001, s_t = 0.010 }", 'cost = "none.json"', "none.json"),
    "cost's unit": ("s_d = 0.001", "s_d_ms = 1.0", "s_d"),
    "cost's sign": ("s_d = 0.001", "s_d = -0.001", "s_d"),
    "policy": ('policy = "fixed_k"', 'policy = "fixed_l"', "fixed_l"),
    "policy's setting": ("{ k = 4 }", "{ m = 4 }", "'m'"),
    "setting's range": ("{ k = 4 }", "{ k = -4 }", "k=-4"),
    "setting's type": ("{ k = 4 }", "{ k = 4.5 }", "k=4.5"),
    "quantity": ('"v_d"', '"v_t"', "v_t"),
    "batch without grids": ('policy = "fixed_k"', 'policy = "fixed_k"\nbatch = 2', "batch"),
    "average": ('policy = "fixed_k"', 'policy = "fixed_k"\naverage = "rounds"', "average"),
    "length": ('policy = "fixed_k"', 'policy = "fixed_k"\nmax_output_tokens = 0', "max_output_tokens"),
    "seed": ('policy = "fixed_k"', 'policy = "fixed_k"\nseed = -1', "seed"),
    "an interval without its value": ("at_least = 0.5", "at_least = 0.5\ninterval = [0.1, 0.2]", "interval"),
    "an interval of one end": ("expected = 2.33", "expected = 2.33\ninterval = [2.1]", "interval"),
    "an interval's ends crossed": ("expected = 2.33", "expected = 2.33\ninterval = [2.4, 2.1]", "interval"),
    "no replays": ('policy = "fixed_k"', 'policy = "fixed_k"\nreplays = 0', "replays"),
    "deeper than recorded": ('policy = "fixed_k"', 'policy = "fixed_k"\nmax_draft_tokens = 99', "99"),
    "a difference of one": ("at_least = 0.5", "at_least = 0.5\ndifference = [{}]", "two subjects"),
    "ratio and difference": (
        "at_least = 0.5",
        "at_least = 0.5\nratio = [{}, {}]\ndifference = [{}, {}]",
        "keep a single key",
    ),
    "an order of one": ("at_least = 0.5", "order = [{ settings = { k = 1 } }]", "two subjects"),
    "an order with a bound": ("at_least = 0.5", "at_least = 0.5\norder = [{}, {}]", "order"),
    "a ratio of three": ("at_least = 0.5", "at_least = 0.5\nratio = [{}, {}, {}]", "two subjects"),
    "a ratio's type": ("at_least = 0.5", "at_least = 0.5\nratio = 3", "ratio"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_in_one_line(claim_file: ClaimFile, case: str) -> None:
    old, new, word = WRONG[case]
    assert old in CLAIMS
    path = claim_file(CLAIMS.replace(old, new, 1))
    with pytest.raises(InputError) as refused:
        check_files([path])
    message = str(refused.value)
    assert word in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize("key", ["trace", "cost", "policy"])
def test_a_name_that_no_file_can_have_is_refused_in_one_line(claim_file: ClaimFile, key: str) -> None:
    long = re.sub(rf"(?m)^{key} = .*$", f'{key} = "{"x" * 5000}"', CLAIMS, count=1)
    assert long != CLAIMS
    with pytest.raises(InputError, match="good.claims.toml|claim ") as refused:
        check_files([claim_file(long)])
    assert "\n" not in str(refused.value)


def test_files_are_read_before_anything_is_evaluated(recorded: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.claims.toml"
    bad.write_text("version = 1\n")
    seen: list[int] = []
    with pytest.raises(InputError, match="there is no claim"):
        check_files([recorded / "good.claims.toml", bad], progress=lambda what, done, total: seen.append(done))
    assert seen == []


def test_a_folder_stands_for_its_claim_files(recorded: Path, tmp_path: Path) -> None:
    assert claim_files([recorded, recorded / "good.claims.toml"]) == [recorded / "good.claims.toml"]
    with pytest.raises(InputError, match="holds no"):
        claim_files([tmp_path])


def test_an_update_keeps_comments(claim_file: ClaimFile) -> None:
    path = claim_file(CLAIMS)
    update_expected(path, {"speedup of four drafts": Estimate.exact(1.23456789)})
    text = path.read_text()
    assert text == CLAIMS.replace("expected = 2.33", "expected = 1.23457")
    assert read_claims(path)[0].statement.expected == 1.23457


def test_an_update_replaces_the_interval_too(claim_file: ClaimFile) -> None:
    path = claim_file(CLAIMS.replace("expected = 2.33", "expected = 2.33\ninterval = [2.2, 2.5]"))
    update_expected(path, {"speedup of four drafts": Estimate(1.23456789, 1.1, 1.3456789)})
    assert "expected = 1.23457\ninterval = [1.1, 1.34568]\n" in path.read_text()


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "claims.md").read_text()
    path = tmp_path / "documented.claims.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    assert [claim.form for claim in read_claims(path)] == ["value", "value", "order", "value", "value"]
