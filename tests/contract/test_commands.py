"""Every command of the contract answers as it did when commands.json was recorded."""

from __future__ import annotations

import pytest

from tests.contract.commands import COMMANDS, Document, Workplace, compared, differences, read_golden


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
    found = compared(COMMANDS[name], golden[name], work.run(COMMANDS[name]))
    assert not found, "\n".join(found)


def test_a_changed_number_is_seen(golden: dict[str, Document]) -> None:
    document = golden["replay fixed_k, profile cost"]
    assert differences(document, {**document, "rounds": document["rounds"] + 1}, 1e-9)
    assert differences(document, {**document, "tau": document["tau"] * (1 + 1e-8)}, 1e-9)
    assert not differences(document, {**document, "tau": document["tau"] * (1 + 1e-12)}, 1e-9)
    assert differences(document, {**document, "tau": document["tau"] * (1 + 1e-12)}, 0.0)
    assert differences(document, {key: value for key, value in document.items() if key != "tau"}, 1e-9)
