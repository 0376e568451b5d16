"""The table of engines' rules of acceptance; tests/realrun/engines proves that engines follow them."""

from __future__ import annotations

import re

import pytest

from specsim.engines.acceptance_rules import RULES, find_rule
from specsim.engines.conventions import CONVENTIONS
from specsim.io.errors import InputError


def test_every_row_has_a_rule_or_a_reason_why_it_is_refused() -> None:
    for name, row in RULES.items():
        assert row.source.startswith(("read", "run")) and bool(row.rule) != bool(row.reason)
        if row.rule:
            assert find_rule(name) == find_rule(row.rule) == row.rule
        else:
            with pytest.raises(InputError, match=re.escape(f"{name!r} cannot be replayed: {row.reason}; choose one")):
                find_rule(name)
    assert {*CONVENTIONS} - {"specsim"} < {*RULES}
    with pytest.raises(InputError, match="unknown rule of acceptance 'llama'; choose one of greedy-draft, sampled"):
        find_rule("llama")
