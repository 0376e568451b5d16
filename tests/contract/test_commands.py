"""Every command of the contract answers as it did when commands.json was recorded."""

from __future__ import annotations

import pytest

from specsim.policy.registry import CHAIN_POLICIES, NAMED
from tests.contract.commands import (
    COMMANDS,
    CONSTANT,
    POLICIES,
    Document,
    Workplace,
    compared,
    differences,
    read_golden,
)


@pytest.fixture(scope="session")
def golden() -> dict[str, Document]:
    return read_golden()


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The inputs, each made once."""
    return Workplace(tmp_path_factory.mktemp("contract"))


def test_the_contract_names_the_commands(golden: dict[str, Document]) -> None:
    assert list(golden) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_as_recorded(name: str, golden: dict[str, Document], work: Workplace) -> None:
    lines = compared(COMMANDS[name], golden[name], work.run(COMMANDS[name]))
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cost", ["constant", "profile"])
def test_a_recorded_replay_adds_up(policy: str, cost: str, golden: dict[str, Document]) -> None:
    document = golden[f"replay {policy}, {cost} cost"]
    speedup, seconds = document["speedup"], document["seconds"]
    assert document["policy"] == policy and document["params"].keys() == NAMED[policy]().settings.keys()
    assert speedup["low"] <= speedup["estimate"] <= speedup["high"]
    assert speedup["estimate"] == pytest.approx(document["ar_seconds"] / seconds)
    assert document["tau"] == pytest.approx(document["output_tokens"] / document["rounds"])
    assert document["v_d"] == pytest.approx(document["accepted"] / document["drafted"])
    if cost == "constant" and NAMED[policy] in CHAIN_POLICIES.values() and policy != "space_k":
        assert seconds == pytest.approx(CONSTANT["s_d"] * document["drafted"] + CONSTANT["s_t"] * document["rounds"])


def test_a_changed_number_is_seen(golden: dict[str, Document]) -> None:
    document = golden["replay fixed_k, profile cost"]
    assert differences(document, {**document, "rounds": document["rounds"] + 1}, 1e-9)
    assert differences(document, {**document, "tau": document["tau"] * (1 + 1e-8)}, 1e-9)
    assert not differences(document, {**document, "tau": document["tau"] * (1 + 1e-12)}, 1e-9)
    assert differences(document, {**document, "tau": document["tau"] * (1 + 1e-12)}, 0.0)
    assert differences(document, {key: value for key, value in document.items() if key != "tau"}, 1e-9)
