"""Which cases of long tests the default run takes, as tests/default_cases.toml says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "default_cases.toml"


def listed() -> dict[str, list[str]]:
    """The names of the cases that the default run takes, by test as in a node's id."""
    tables = tomllib.loads(FILE.read_text())
    return {f"tests/{folder}/{test}": names for folder, tests in tables.items() for test, names in tests.items()}


def mark_the_others(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the listed tests' cases that the default run leaves out; those on a GPU are few and stay."""
    usual = listed()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        taken = any(fnmatchcase(case.removesuffix("]"), name) for name in usual.get(test, ["*"]))
        if not taken and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.slow)


def unknown(ids: Iterable[str]) -> list[str]:
    """Listed tests, and names of their cases, that match none of these ids of all tests."""
    cases: dict[str, list[str]] = {}
    for name in ids:
        test, _, case = name.partition("[")
        cases.setdefault(test, []).append(case.removesuffix("]"))
    return [
        f"{test}: {name}"
        for test, names in listed().items()
        for name in names or ["*"]
        if not any(fnmatchcase(case, name) for case in cases.get(test, ()))
    ]
