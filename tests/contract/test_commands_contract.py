"""Both command lines, in-process: a JSON object on standard output, or a line of error and code 2."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

import specsim.cli.main
import specsim.trace.files
from specsim.io.files import file_digest
from specsim.policy.registry import CHAIN_POLICIES, NAMED, POLICIES, TREE_POLICIES
from tests.contract.test_options_named import commands
from tests.support.commands import Result, assert_refused, call, json_of
from tests.support.tiny import tiny_pair

SERVED = [  # by a draft model's trace without a predictor
    name for name, kind in CHAIN_POLICIES.items() if "score" not in kind.features and not kind.drafter_kinds
]
OWN = """
from dataclasses import dataclass

from specsim import ChainPolicy, setting
from specsim.policy.chain.fixed_k import keep_drafting
from specsim.policy.memoryless import initial_state, update


@dataclass(frozen=True)
class Mine(ChainPolicy):
    k: int = setting(2, 1, 64, tune=(1, 8), doc="draft length")
    max_draft_tokens: int = setting(6, 1, 256, bounds="depth", doc="longest draft")

    name = "mine"
    source = "test"
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)
"""


COMMANDS = commands()


class Files(NamedTuple):
    models: list[object]  # options that name the tiny pair
    prompts: Path
    trace: Path
    recorded: Result
    profile: Path
    profiled: Result
    constant: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The tiny pair on disk, prompts, and what `record` and `profile` make of them."""
    folder = tmp_path_factory.mktemp("cli")
    pair = tiny_pair()
    for name, model in (("target", pair.target), ("draft", pair.drafter.model)):
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
    names = ["--target", folder / "target", "--draft-model", folder / "draft"]
    models = [*names, "--dtype", "float64", "--threads", 0]
    prompts = folder / "prompts.jsonl"
    rng = np.random.default_rng(0)
    lines = [{"text": "".join(map(chr, rng.integers(33, 127, 6 + i))), "domain": "ab"[i % 2]} for i in range(8)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace, profile, constant = folder / "trace", folder / "profile.json", folder / "constant.json"
    sizes = ["--prompts", prompts, "--max-new-tokens", 30, "--max-draft-tokens", 6]
    recorded = call("realrun", "record", trace, *models, *sizes, "--json")
    profiled = call(
        "realrun", "profile", profile, *models, "--contexts", "4,60", "--max-draft-tokens", 6, "--minutes", 0, "--json"
    )
    constant.write_text(json.dumps({"s_d": 0.001, "s_t": 0.01}))
    return Files(models, prompts, trace, recorded, profile, profiled, constant)


def test_record_prints_one_object_and_writes_the_trace(files: Files) -> None:
    document = json_of(files.recorded)
    assert document["sequences"] == 8 and document["output_tokens"] > 0
    info = json_of(call("specsim", "info", files.trace, "--json"))
    assert info["depth"] == 6 and info["domains"] == {"a": 4, "b": 4}
    assert info["output_tokens"] == document["output_tokens"]
    assert info["mean_match_len"] == document["mean_match_len"]
    assert info["target"] == "target" and info["drafter"] == "draft"  # no path of this machine
    for file in (files.trace / "meta.json", files.profile):
        assert str(files.trace.parent) not in file.read_text()


def test_profile_prints_what_it_writes(files: Files) -> None:
    assert json_of(files.profiled) == json.loads(files.profile.read_text())


def test_tune_holds_what_it_is_told_and_repeats_itself(files: Files) -> None:
    args = ["tune", files.trace, "--policy", "adaedl", "--cost", files.constant, "--trials", 4, "--json"]
    fixed = ["--set", "dynamic=false", "--set", "gamma=0.5", "--seed", 3]
    first = call("specsim", *args, *fixed)
    assert json_of(first)["best_params"].items() >= {"dynamic": False, "gamma": 0.5}.items()
    assert call("specsim", *args, *fixed) == first


def test_policies_lists_every_policy_and_setting(own: Path) -> None:
    document = json_of(call("specsim", "policies", "--json"))
    assert document.keys() == NAMED.keys()
    for name, kind in NAMED.items():
        assert document[name]["settings"].keys() == kind().settings.keys()
        assert all(s["doc"] and s["low"] <= s["high"] for s in document[name]["settings"].values())
    assert json_of(call("specsim", "policies", "--policy-file", own, "--json")).keys() == {*NAMED, "mine"}
    table = call("specsim", "policies").out
    assert "constant, heuristic_transient, heuristic" in table and "true, false" in table
    assert "(" not in table[: table.index("└")]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own policy file: fixed_k under another name."""
    path = tmp_path_factory.mktemp("own") / "my_policy.py"
    path.write_text(OWN)
    return path


def test_a_policy_file_replays_and_is_tuned(files: Files, own: Path) -> None:
    args = [files.trace, "--cost", files.constant, "--json"]
    mine = json_of(call("specsim", "replay", *args, "--policy", own, "--set", "k=3"))
    built_in = json_of(call("specsim", "replay", *args, "--policy", "fixed_k", "--set", "k=3"))
    assert mine["policy"] == "mine" and mine["speedup"] == built_in["speedup"]
    tuned = json_of(call("specsim", "tune", *args, "--policy", f"{own}:mine", "--trials", 8))
    assert tuned["best_params"].keys() == {"k", "max_draft_tokens"}
    assert_refused(call("specsim", "replay", *args, "--policy", own.parent / "no.py"), "no.py", "does not exist")
    assert_refused(call("specsim", "replay", *args, "--policy", f"{own}:yours"), "no policy 'yours'", "mine")


def test_a_draft_limit_that_is_not_given_follows_the_trace(files: Files) -> None:
    document = json_of(call("specsim", "replay", files.trace, "--policy", "adaedl", "--cost", files.profile, "--json"))
    assert document["params"]["max_draft_tokens"] == 6


def test_an_expectation_is_near_the_mean_of_replays(files: Files) -> None:
    arguments = ("specsim", "replay", files.trace, "--policy", "beta_ts", "--cost", files.profile, "--json")
    expected = json_of(call(*arguments, "--expected"))["speedup"]["estimate"]
    drawn = [json_of(call(*arguments, "--seed", seed))["speedup"]["estimate"] for seed in range(12)]
    assert abs(np.mean(drawn) - expected) <= 4 * np.std(drawn) / np.sqrt(len(drawn))
    assert np.std(drawn) > 0


def test_replay_reports_a_policy_that_learns_on_other_sequences(files: Files) -> None:
    args = ["replay", files.trace, "--policy", "time_gain", "--set", "max_draft_tokens=6", "--cost", files.profile]
    learned = json_of(call("specsim", *args, "--json"))
    assert learned["learned_on"] == learned["sequences"] == 4
    assert learned["params"]["cost_ratio"] != POLICIES["time_gain"]().settings["cost_ratio"]
    assert "learned on 4 sequences, reported on 4 others" in " ".join(call("specsim", *args).out.split())
    given = json_of(call("specsim", *args, "--set", "cost_ratio=0.3", "--json"))
    assert given["learned_on"] == 0 and given["sequences"] == 8
    assert json_of(call("specsim", *args, "--tuning-share", "0.75", "--json"))["learned_on"] == 6
    shape = ["--policy", "space_k", "--set", "k=4", "--cost", files.constant, "--json"]
    own_cost = json_of(call("specsim", "replay", files.trace, *shape))
    assert own_cost["seconds"] == pytest.approx(0.01 * own_cost["rounds"])  # its drafts ride in the verification


def test_leaderboard_prints_one_object_and_writes_it(files: Files, own: Path, tmp_path: Path) -> None:
    args = ["leaderboard", files.trace, "--cost", files.constant, "--policy-file", own, "--trials", 4, "--replays", 2]
    out = tmp_path / "board"
    document = json_of(call("specsim", *args, "--out", out, "--json"))
    assert json.loads((out / "leaderboard.json").read_text()) == document
    assert {path.name for path in out.iterdir()} == {"leaderboard.json", "leaderboard.csv", "report.html"}
    (board,) = document["boards"]
    static = {name for name, kind in TREE_POLICIES.items() if kind.static}  # which need no recorded trees
    assert {row["policy"] for row in board["rows"]} == {*SERVED, *static, "mine"}
    assert {skipped["policy"] for skipped in board["skipped"]} >= {"space_k"}
    for row in board["rows"]:
        assert row["speedup"]["estimate"] <= board["oracle"]["estimate"]
    page = (out / "report.html").read_text()
    assert "mine, tuned" in page and str(files.trace.parent) not in page  # no path of this machine


def test_leaderboard_of_several_traces_and_lengths_for_people(files: Files, own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(files.trace, other)
    args = ["leaderboard", files.trace, other, "--cost", files.constant, "--cost", files.profile]
    args += ["--policy", "fixed_k", "--policy", own, "--max-draft-tokens", "3,6", "--trials", 4]
    shown = call("specsim", *args)
    assert shown.code == 0 and shown.err == ""
    for text in (
        "trace: drafts up to 3",
        "other: drafts up to 6",
        "all 2 traces",
        "mine, tuned",
        "oracle",
    ):
        assert text in shown.out, text
    document = json_of(call("specsim", *args, "--json"))
    assert [(b["trace"], b["max_draft"]) for b in document["boards"]] == [
        ("trace", 3), ("trace", 6), ("other", 3), ("other", 6)
    ]  # fmt: skip
    assert [group["max_draft"] for group in document["combined"]] == [3, 6]


BAD_BOARD: dict[str, tuple[str, str]] = {
    "unknown policy": ("--policy oracle9", "oracle9"),
    "no such file": ("--policy-file nowhere.py", "nowhere.py"),
    "no number": ("--max-draft-tokens deep", "deep"),
    "deeper than recorded": ("--max-draft-tokens 7", "depth 6"),
    "no length": ("--max-draft-tokens 0", "depth 6"),
    "no trial": ("--trials 0", "--trials"),
    "no seed": ("--replays 0", "--replays"),
    "share of all": ("--tuning-share 1", "tuning_share"),
    "too many costs": ("--cost again.json --cost again.json", "again.json"),
    "nothing to rank": ("--policy space_k", "serves none"),
}


@pytest.mark.parametrize(("options", "says"), BAD_BOARD.values(), ids=BAD_BOARD.keys())
def test_a_bad_board_is_refused(files: Files, options: str, says: str) -> None:
    args = [files.trace, "--cost", files.constant, *options.split()]
    assert_refused(call("specsim", "leaderboard", *args), says)


def test_a_trace_given_twice_is_refused(files: Files) -> None:
    assert_refused(call("specsim", "leaderboard", files.trace, files.trace, "--cost", files.constant), "given twice")


def test_output_of_one_token_is_still_json(files: Files, tmp_path: Path) -> None:
    """Nothing can be drafted then, so every rate is a division by zero somewhere."""
    args = ["--prompts", files.prompts, "--max-new-tokens", 1, "--max-draft-tokens", 1, "--json"]
    json_of(call("realrun", "record", tmp_path / "trace", *files.models, *args))
    args = [tmp_path / "trace", "--policy", "fixed_k", "--cost", files.constant, "--json"]
    document = json_of(call("specsim", "replay", *args, "--set", "k=1"))
    assert document["drafted"] == 0 and document["speedup"]["estimate"] == pytest.approx(1.0)
    json_of(call("specsim", "tune", *args))


def test_validate_prints_one_object_and_can_fail_its_check(files: Files, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["validate", "--out", out, *files.models, "--prompts", files.prompts]
    args += ["--max-new-tokens", 12, "--max-draft-tokens", 2, "--trials", 1, "--repeats", 3]
    document = json_of(call("realrun", *args, "--json"))
    assert document["rows"] and document["median_abs_error_percent"] >= 0
    for row in document["rows"]:
        assert row["rounds_identical_percent"] == 100.0
    failed = call("realrun", *args, "--policy", "fixed_k", "--max-error", -1)
    assert failed.code == 1 and "errors against the measurement" in failed.out
    assert [line.split(":")[0] for line in failed.err.splitlines()] == ["without speculation", "forecast"]
    assert_refused(call("realrun", *args, "--seed", 1), "decoding", "--overwrite")


def test_tables_are_for_people(files: Files) -> None:
    shown = call("specsim", "replay", files.trace, "--policy", "fixed_k", "--cost", files.constant)
    assert shown.code == 0 and shown.err == "" and "speedup" in shown.out and "fixed_k" in shown.out
    for args in (["info", files.trace], ["policies"]):
        result = call("specsim", *args)
        assert result.code == 0 and result.err == "" and len(result.out.splitlines()) > 5
    args = ["--policy", "fixed_k", "--cost", files.constant]
    assert "held-out" in call("specsim", "tune", files.trace, *args).out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_and_every_command(name: str) -> None:
    command, *rest = name.split()
    result = call(command, *rest, "--help")
    assert result.code == 0 and result.err == ""
    named = set(re.findall(r"--?[\w-]+", result.out)) | set(result.out.split())
    params = COMMANDS[name].get_params(COMMANDS[name].context_class(COMMANDS[name]))
    shown = [parameter for parameter in params if not getattr(parameter, "hidden", False)]
    options = {option for parameter in shown for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {option for option in options if option.startswith("-")} <= named
    assert set(getattr(COMMANDS[name], "commands", ())) <= named
    if rest:
        assert len((COMMANDS[name].help or "").splitlines()[0]) <= 45  # fits the list of commands
    assert rest or len(result.out.splitlines()) <= 40  # a screen
    if not hasattr(COMMANDS[name], "commands"):  # a command says what it does, and each option what it is for
        assert COMMANDS[name].help
        assert all(getattr(p, "help", "") for p in COMMANDS[name].params), name


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if hasattr(command, "commands")])
def test_a_bare_command_shows_its_help(name: str) -> None:
    result = call(*name.split())
    assert result.code == 2 and result.out == "" and "Usage:" in result.err


BAD_REPLAY: dict[str, tuple[str, str]] = {
    "unknown policy": ("--policy oracle9", "oracle9"),
    "unknown setting": ("--policy fixed_k --set q=1", "'q'"),
    "no equals sign": ("--policy fixed_k --set k", "NAME=VALUE"),
    "no name": ("--policy fixed_k --set =3", "NAME=VALUE"),
    "no value": ("--policy fixed_k --set k=", "NAME=VALUE"),
    "no number": ("--policy fixed_k --set k=four", "k='four'"),
    "no whole number": ("--policy fixed_k --set k=2.5", "whole"),
    "no truth value": ("--policy adaedl --set dynamic=maybe", "dynamic"),
    "NaN": ("--policy adaedl --set gamma=nan", "gamma=nan"),
    "infinity": ("--policy adaedl --set gamma=inf", "gamma=inf"),
    "below the range": ("--policy fixed_k --set k=0", "k=0"),
    "above the range": ("--policy max_confidence --set lambda0=1.5", "lambda0=1.5"),
    "deeper than recorded": ("--policy fixed_k --set k=7", "depth 6"),
    "deeper by will": ("--policy adaedl --set max_draft_tokens=7", "depth 6"),
    "no policy": ("", "--policy"),
    "negative seed": ("--policy fixed_k --seed -1", "--seed"),
    "huge seed": ("--policy fixed_k --seed 4294967296", "--seed"),
    "unknown option": ("--policy fixed_k --lambda 3", "--lambda"),
}
BAD_TUNE: dict[str, tuple[str, str]] = {
    "no trial": ("--policy fixed_k --trials 0", "--trials"),
    "unknown search": ("--policy fixed_k --search random", "random"),
    "share of nothing": ("--policy fixed_k --tuning-share 0", "tuning_share"),
    "share of all": ("--policy fixed_k --tuning-share 1", "tuning_share"),
    "share NaN": ("--policy fixed_k --tuning-share nan", "tuning_share"),
    "no hold-out": ("--policy fixed_k --tuning-share 0.99", "split"),
    "held out of range": ("--policy adaedl --set gamma=-1", "gamma"),
    "held deeper than recorded": ("--policy adaedl --set max_draft_tokens=7", "depth 6"),
}


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        *(pytest.param("replay", *case, id=f"replay {name}") for name, case in BAD_REPLAY.items()),
        *(pytest.param("tune", *case, id=f"tune {name}") for name, case in {**BAD_REPLAY, **BAD_TUNE}.items()),
    ],
)
def test_bad_options_are_refused(files: Files, command: str, options: str, says: str) -> None:
    args = [files.trace, *options.split(), "--cost", files.constant, "--json"]
    assert_refused(call("specsim", command, *args), says)


def test_a_missing_cost_option_or_file_is_refused(files: Files) -> None:
    args = ["replay", files.trace, "--policy", "fixed_k"]
    assert_refused(call("specsim", *args), "--cost", "--gpu")
    assert_refused(call("specsim", *args, "--cost", files.trace / "none.json"), "none.json", "does not exist")


@pytest.mark.parametrize(("contexts", "depth", "says"), [("50,60", 6, "contexts"), ("4,60", 2, "--max-draft-tokens")])
def test_a_profile_that_does_not_cover_the_trace_is_refused(
    files: Files, tmp_path: Path, contexts: str, depth: int, says: str
) -> None:
    document = json.loads(files.profile.read_text())
    document["contexts"] = [int(c) for c in contexts.split(",")]
    for times in ("mean_s", "relative_half_width"):
        document[times]["verify"] = document[times]["verify"][: depth + 1]
    (tmp_path / "profile.json").write_text(json.dumps(document))
    args = [files.trace, "--policy", "fixed_k", "--cost", tmp_path / "profile.json"]
    assert_refused(call("specsim", "replay", *args), says)


BAD_MODEL: dict[str, tuple[str, str]] = {
    "unknown dtype": ("--dtype int8", "int8"),
    "unknown device": ("--device abacus", "abacus"),
    "absent device": ("--device cuda:99", "cuda:99"),
    "missing model": ("--target /nowhere/at/all", "/nowhere/at/all"),
    "missing prompts": ("--prompts /nowhere.jsonl", "/nowhere.jsonl"),
    "depth": ("--max-draft-tokens 0", "--max-draft-tokens"),
    "depth above 64": ("--max-draft-tokens 65", "--max-draft-tokens"),
    "temperature": ("--temperature 0", "temperature"),
    "temperature NaN": ("--temperature nan", "temperature"),
    "mode": ("--mode beam", "beam"),
    "too long": ("--max-new-tokens 9999", "positions"),
    "seed": ("--seed 4294967296", "--seed"),
}


@pytest.mark.parametrize(("options", "says"), BAD_MODEL.values(), ids=BAD_MODEL.keys())
@pytest.mark.parametrize("command", ["record", "validate"])
def test_what_cannot_be_run_is_refused_and_leaves_nothing(
    files: Files, tmp_path: Path, command: str, options: str, says: str
) -> None:
    out = ["record", tmp_path / "out"] if command == "record" else ["validate", "--out", tmp_path / "out"]
    args = [*out, *files.models, "--prompts", files.prompts, *options.split(), "--json"]
    assert_refused(call("realrun", *args), says)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("options", "says"),
    [("--contexts 8,x", "8,x"), ("--contexts 60,4", "increase"), ("--contexts 4,9999", "positions"),
     ("--contexts 0,9", "2 tokens"), ("--max-draft-tokens 0", "--max-draft-tokens"),
     ("--precision 0", "example 1%"), ("--precision 1%%", "1%"), ("--precision 100%", "1%"), ("--minutes -1", "min")],
)  # fmt: skip
def test_a_profile_that_cannot_be_measured_is_refused(files: Files, tmp_path: Path, options: str, says: str) -> None:
    args = ["profile", tmp_path / "out.json", *files.models, *options.split()]
    assert_refused(call("realrun", *args), says)
    assert not list(tmp_path.iterdir())


def test_an_existing_trace_is_kept_unless_told(files: Files, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    shutil.copytree(files.trace, folder)
    args = ["record", folder, *files.models, "--prompts", files.prompts, "--max-new-tokens", 5, "--max-draft-tokens", 2]
    assert_refused(call("realrun", *args), folder, "--overwrite")
    assert file_digest(folder / "steps.parquet") == file_digest(files.trace / "steps.parquet")
    assert json_of(call("realrun", *args, "--overwrite", "--json"))["output_tokens"] == 40
    assert [p.name for p in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("name", ["sequences.parquet", "steps.parquet", "meta.json"])
def test_an_interrupted_recording_leaves_no_half_written_trace(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exists: bool
) -> None:
    def interrupted(table: Any, path: Path, **options: Any) -> None:
        write(table, path, **options)
        if path.name == name:
            path.write_bytes(path.read_bytes()[:100])
            raise KeyboardInterrupt

    def no_checksum(path: Path) -> str:
        raise KeyboardInterrupt

    folder = tmp_path / "trace"
    if exists:
        shutil.copytree(files.trace, folder)
    write = pq.write_table
    monkeypatch.setattr(pq, "write_table", interrupted)
    if name == "meta.json":
        monkeypatch.setattr(specsim.trace.files, "file_digest", no_checksum)
    args = ["record", folder, *files.models, "--prompts", files.prompts, "--max-new-tokens", 5]
    result = call("realrun", *args, "--overwrite")
    assert result.code not in (0, 2) and result.out == ""
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace"] * exists + ["trace.partial"]
    if exists:
        assert json_of(call("specsim", "info", folder, "--json")) == json_of(
            call("specsim", "info", files.trace, "--json")
        )


REDUCED = ["--device", "cpu", "--dtype", "float32", "--smoke-test"]


def test_shapes_are_listed() -> None:
    rows = {row["shape"]: row for row in json_of(call("realrun", "shapes", "--json"))["shapes"]}
    assert rows["llama-2-7b"]["parameters"] == pytest.approx(6.74e9, rel=1e-3)
    assert rows["llama-68m"]["role"] == "drafter"


def test_two_cost_grids_price_a_trace(files: Files, tmp_path: Path) -> None:
    axes = ["--contexts", "4,256", "--batches", "1,2", "--repeats", 2, *REDUCED]
    for shape, tokens in (("llama-3.1-8b", "1,2,4,9"), ("llama-3.2-1b", "1,2")):
        document = json_of(
            call("realrun", "cost-grid", shape, "--out", tmp_path / shape, "--tokens", tokens, *axes, "--json")
        )
        assert json.loads((tmp_path / shape).read_text()) == document and not document["missing"]
    costs = ["--cost", tmp_path / "llama-3.1-8b", "--draft-cost", tmp_path / "llama-3.2-1b"]
    for batch in (1, 2):
        policy = ["--policy", "fixed_k", "--set", "k=3", "--batch", batch, "--json"]
        assert json_of(call("specsim", "replay", files.trace, *costs, *policy))["seconds"] > 0
    assert_refused(call("specsim", "replay", files.trace, "--policy", "fixed_k", *costs[:2]), "--draft-cost")
    assert_refused(call("specsim", "replay", files.trace, "--policy", "fixed_k", *costs, "--batch", 3), "1, 2")
    options = ["--policy", "fixed_k", "--cost", files.constant, "--batch", 2]
    assert_refused(call("specsim", "replay", files.trace, *options), "has no batches")
    assert_refused(call("realrun", "cost-grid", "llama-9", "--out", tmp_path / "x", *REDUCED), "llama-9", "llama-2-7b")
    assert_refused(
        call("realrun", "cost-grid", "llama-2-7b", "--out", tmp_path / "x", "--batches", "1;2", *REDUCED), "1;2"
    )


def test_scripted_acceptance_from_the_command_line(files: Files, tmp_path: Path) -> None:
    options = ["--trials", 2, "--repeats", 3, "--minutes", 0.05, *REDUCED]
    out = tmp_path / "scripted.json"
    document = json_of(
        call("realrun", "scripted", "llama-2-7b", "one-layer-7b", files.trace, "--out", out, *options, "--json")
    )
    assert json.loads(out.read_text()) == document
    assert all(row["rounds_identical_percent"] == 100 for row in document["rows"])
