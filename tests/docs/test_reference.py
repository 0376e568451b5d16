"""The reference shows every public name, files that pages name exist, and their example policy and commands run."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.commands import command_pages
from docs.pages import HOME, block, written
from speckernels.bench.cases import ordered_cases
from speckernels.bench.measure import OWN
from specsim.compare.leaderboard import leaderboards
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import tune_on
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import NAMED, find_policy, make_policy
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from tests.contract.test_options_named import APPS, commands, options
from tests.support.commands import call
from tests.support.reference import RampCost, small_trace


@pytest.mark.parametrize("package", ["specsim", "realrun", "speckernels"])
def test_every_public_name_stands_in_the_reference(package: str) -> None:
    shown = (HOME / "reference" / f"{package}.md").read_text()
    names = import_module(package).__all__
    assert [name for name in names if f"::: {package}.{name}\n" not in shown and f"`{name}`" not in shown] == []


@pytest.mark.parametrize("package", ["specsim", "realrun"])
def test_the_architecture_shows_every_folder_below_those_that_it_imports(package: str) -> None:
    contracts = tomllib.loads((HOME.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == [package]]
    level = {name: number for number, layer in enumerate(reversed(layers)) for name in layer.split(" | ")}
    folders = {name for name in level if (HOME.parent / package / name).is_dir()}
    rows = re.findall(rf"^\| `{package}/(\w+)/` \|", (HOME / "architecture.md").read_text(), re.MULTILINE)
    assert set(rows) == folders
    assert [level[name] for name in rows] == sorted(level[name] for name in rows)


@pytest.mark.parametrize("app", APPS)
def test_every_command_stands_in_the_reference(app: str) -> None:
    commands: Any = typer.main.get_command(APPS[app])
    text = (HOME / "reference" / "commands.md").read_text()
    assert [name for name in commands.commands if not re.search(rf"`{name}`|^  {name} ", text, re.MULTILINE)] == []


def test_every_command_has_a_page_with_all_its_options() -> None:
    made = command_pages()
    for name, command in commands().items():
        if not hasattr(command, "list_commands"):
            page = made[f"reference/commands/{name.replace(' ', '-')}.md"]
            assert [option for option in options(name) if option.startswith("-") and option not in page] == []


def test_every_policy_stands_on_the_page_that_helps_to_choose() -> None:
    text = (HOME / "which.md").read_text()
    assert [name for name in NAMED if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", [path.relative_to(HOME.parent).as_posix() for path in written()])
def test_files_that_a_page_names_exist(name: str) -> None:
    text = (HOME.parent / name).read_text()
    named = re.findall(r"`((?:specsim|realrun|kernels|studies|tests|claims|docs)/[\w./]+)`", text)
    assert [path for path in sorted(set(named)) if not (HOME.parent / path).exists()] == []


def test_every_page_stands_in_the_menu() -> None:
    menu = (HOME.parent / "mkdocs.yml").read_text()
    assert [path.name for path in HOME.rglob("*.md") if path.relative_to(HOME).as_posix() not in menu] == []


MODES = ("launch", "graph", "host")  # of the kernels' benchmark on a GPU


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "prob_floor.py"
    path.write_text(block("extending.md", "class ProbFloor"))
    return path


@pytest.fixture(scope="module")
def kind(example: Path) -> type[ChainPolicy]:
    return find_policy(str(example))


def test_the_example_policy_replays(example: Path) -> None:
    trace, cost = small_trace(), RampCost()
    few = predict_policy(
        PricedTrace(trace, cost), make_policy(str(example), {"floor": "1.0", "max_draft_tokens": trace.depth})
    )
    many = predict_policy(
        PricedTrace(trace, cost),
        make_policy(f"{example}:prob_floor", {"floor": "0.0", "max_draft_tokens": trace.depth}),
    )
    assert few.drafted / few.rounds <= 1 < many.drafted / many.rounds


def test_the_example_policy_is_tuned(kind: type[ChainPolicy]) -> None:
    trace = small_trace()
    tuning, held = split_sequences(trace)
    result = tune_on(
        kind,
        PricedTrace(trace.select(tuning), RampCost()),
        PricedTrace(trace.select(held), RampCost()),
        SearchSettings(trials=10),
    )
    assert isinstance(result.best, kind) and result.best.settings["max_draft_tokens"] == trace.depth


def test_the_example_policy_stands_on_the_leaderboard(kind: type[ChainPolicy]) -> None:
    board = leaderboards({"small": small_trace()}, [RampCost()], kinds=[find_policy("fixed_k"), kind], trials=5)[0]
    assert {row.label for row in board.rows} == {"fixed_k, tuned", "fixed_k, K = 4", "prob_floor, tuned"}


def test_the_example_of_a_claim_names_a_case_of_the_benchmark() -> None:
    claims = tomllib.loads(block("claims.md", 'document = "bench.json"', "toml"))["claim"]
    (at,) = [claim["at"] for claim in claims if "at" in claim]
    rows = {f"{case}-{mode}-{name}" for _, case in ordered_cases(on_gpu=True) for mode in MODES for name in OWN}
    assert at[1]["param"] in rows and [at[0], *at[2:]] == ["benchmarks", "extra_info", "median_us"]


def test_the_commands_for_engines_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """advise, doctor and every engine's export, in twelve lines."""
    commands = [
        shlex.split(line, comments=True)
        for line in block("howto/choose_k.md", "specsim export vllm", "sh").splitlines()
    ]
    exported = {engine for _, verb, engine, *_ in commands if verb == "export"}
    assert len(commands) <= 12 and {verb for _, verb, *_ in commands} == {"advise", "doctor", "export"}
    assert exported == {"vllm", "sglang", "llamacpp", "tensorrt-llm", "transformers"}
    monkeypatch.chdir(tmp_path)
    Path("counters.json").write_text(json.dumps({"drafted": [9000] * 4, "accepted": [7200, 5000, 2000, 400]}))
    call("specsim", "example")
    Path("example/trace").rename("trace")
    for command in commands:
        done = call(*command)
        assert done.code == 0 and done.out and not done.err, (command, done)
        if "--out" in command:
            assert json.loads(Path(command[-1]).read_text())
