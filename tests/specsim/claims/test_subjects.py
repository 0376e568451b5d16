"""What claims are of beside replays: full batches, the parts of a real run's rounds, a training with several seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import specsim
from specsim.claims.check import Checked, check_files
from specsim.errors import InputError
from specsim.files import write_table
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import GoodputK
from specsim.serving.speedup_map import speedup_map
from specsim.speedup.intervals import Estimate, ratio_interval
from specsim.speedup.seeds import linear_parts, mean_over_seeds
from tests.specsim.claims.test_check import validation
from tests.specsim.claims.test_files import beside

COST = "vllm-llama3.1-8b-eagle-h100"
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


TRAININGS = {
    "a": {"0": {"tokens": [9, 8], "rounds": [3, 4]}, "1": {"tokens": [10, 9], "rounds": [5, 3]}},
    "b": {"0": {"tokens": [9, 8], "rounds": [4, 5]}, "1": {"tokens": [10, 9], "rounds": [6, 4]}},
}
SEEDS = 'version = 1\n[defaults]\nseeds = "it.json"\nlists = ["tokens"]\n[[claim]]\nname = "it"\n'
LENGTHS = 'over = ["rounds"]\n'
BOTH = '[{ at = ["a"] }, { at = ["b"] }]\n'


def trained(folder: Path, claim: str, document: object = TRAININGS) -> Checked:
    """The one claim of these lines over trainings with two seeds."""
    (folder / "it.json").write_text(json.dumps(document))
    path = folder / "it.claims.toml"
    path.write_text(SEEDS + claim)
    (found,) = check_files([path])
    return found


def mean_of(*names: str) -> Estimate:
    """Acceptance length of the first training, less that of a second."""
    parts = [
        linear_parts(*([seed[column] for seed in TRAININGS[name].values()] for column in ("tokens", "rounds")))
        for name in names
    ]
    return mean_over_seeds(parts[0] - sum(parts[1:]))


def test_a_training_with_several_seeds_is_their_mean(tmp_path: Path) -> None:
    """Of ratios of sums, and its interval is over seeds and sequences; both ends and the value are held to it."""
    wanted = mean_of("a")
    assert wanted.estimate == pytest.approx((17 / 7 + 19 / 8) / 2)
    claim = LENGTHS + 'at = ["a"]\nexpected = {:.4f}\ninterval = [{:.4f}, {:.4f}]\ntolerance = 0.00005'
    ends = (wanted.estimate, wanted.low, wanted.high)
    found = trained(tmp_path, claim.format(*ends))
    assert found.verdict == "holds" and found.interval == wanted and found.found == Estimate.exact(wanted.estimate)
    for moved in ((0.0002, 0, 0), (0, -0.0002, 0), (0, 0, 0.0002)):
        said = claim.format(*(end + by for end, by in zip(ends, moved, strict=True)))
        assert trained(tmp_path, said).verdict == "drifted"
    other = json.loads(json.dumps(TRAININGS).replace("[9, 8]", "[9, 9]", 1))
    assert trained(tmp_path, claim.format(*ends), other).verdict == "drifted"
    as_list = {"a": list(TRAININGS["a"].values())}
    assert trained(tmp_path, claim.format(*ends), as_list).verdict == "holds"


def test_trainings_of_the_same_seeds_are_compared_in_pairs(tmp_path: Path) -> None:
    wanted = mean_of("a", "b")
    assert wanted.low > 0 and mean_of("a").low < mean_of("b").high  # apart in pairs alone
    found = trained(tmp_path, f"{LENGTHS}difference = {BOTH}at_least = 0.0")
    assert found.verdict == "holds" and found.found == wanted
    assert trained(tmp_path, f"{LENGTHS}order = {BOTH}").verdict == "holds"
    other = {**TRAININGS, "b": {f"{number}0": seed for number, seed in TRAININGS["b"].items()}}
    assert trained(tmp_path, f"{LENGTHS}difference = {BOTH}at_least = 0.0", other).verdict == "not decidable"


def test_a_share_over_all_seeds_is_a_ratio_of_two_means(tmp_path: Path) -> None:
    """Also of lists that are summed; a list may hold zeros."""
    claim = 'at = ["a"]\nratio = [{ lists = ["rounds"] }, { lists = ["tokens", "rounds"] }]\ntolerance = 1e-12\n'
    assert trained(tmp_path, f"{claim}expected = {15 / (36 + 15)}").verdict == "holds"
    none = json.loads(json.dumps(TRAININGS).replace("rounds", "truncated").replace("[3, 4]", "[0, 0]"))
    share = 'at = ["a"]\nratio = [{ lists = ["truncated"] }, { lists = ["tokens"] }]\ntolerance = 1e-12\n'
    assert trained(tmp_path, f"{share}expected = {8 / 36}", none).verdict == "holds"


@pytest.mark.parametrize(
    ("document", "claim", "word"),
    [
        ({"a": 3}, "", "at least two seeds"),
        ({"a": {"0": TRAININGS["a"]["0"]}}, "", "at least two seeds"),
        ({"b": {}}, "", "no such key"),
        ({"a": [TRAININGS["a"]["0"], 3]}, "", "tokens of seed '1' is no list"),
        ({"a": {"0\n": {"tokens": [1, -1]}, "1": {}}}, "", "tokens of seed '0.n' is no list"),
        ({"a": [{"tokens": [1, 2]}, {"tokens": [1, 2, 3]}]}, "", "different lengths"),
        ({"a": [{"tokens": [1, 2], "rounds": [1]}] * 2}, LENGTHS, "same two sequences"),
        ({"a": [{"tokens": [1], "rounds": [1]}] * 2}, LENGTHS, "same two sequences"),
        ({"a": [{"tokens": [1, 2], "rounds": [0, 0]}] * 2}, LENGTHS, "rounds of a seed sum to 0"),
        ({"a": [{"tokens": [1e300, 1.0]}, {"tokens": [1.0, 1.0]}]}, "", "too far apart"),
        (TRAININGS, "over = []\n", "over"),
        (TRAININGS, 'lists = "tokens"\n', "lists"),
        (TRAININGS, 'document = "it.json"\nseeds = "it.json"\n', "exclude"),
        (TRAININGS, 'policy = "fixed_k"\n', "policy"),
    ],
)
def test_trainings_that_cannot_be_claimed_are_refused(tmp_path: Path, document: object, claim: str, word: str) -> None:
    with pytest.raises(InputError, match=word) as refused:
        trained(tmp_path, f'{claim}at = ["a"]\nat_least = 0.0', document)
    assert "\n" not in str(refused.value)
