"""The library computes what it did when values.json was recorded."""

from __future__ import annotations

import json

import pytest

from tests.contract.commands import differences, read_golden
from tests.contract.values import GOLDEN, TOLERANCE, VALUES, Value


@pytest.fixture(scope="session")
def golden() -> dict[str, Value]:
    return read_golden(GOLDEN)


def test_the_contract_names_the_values(golden: dict[str, Value]) -> None:
    assert list(golden) == list(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_as_recorded(name: str, golden: dict[str, Value]) -> None:
    lines = differences(golden[name], json.loads(json.dumps(VALUES[name]())), TOLERANCE)
    assert not lines, "\n".join(lines)
