"""A trace, costs and a claim file that holds, as every test of claims starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsim import write_trace
from specsim.acceptance.iid import IID
from specsim.acceptance.synthetic import generate

CLAIMS = """\
version = 1

[defaults]
trace = "trace"
cost = { s_d = 0.001, s_t = 0.010 }
tolerance_percent = 0.5

[[claim]]
name = "speedup of four drafts"
policy = "fixed_k"
settings = { k = 4 }
expected = 2.33
source = "a table"

# A bound is a statement about prompts like these.
[[claim]]
name = "drafts are accepted"
policy = "fixed_k"
settings = { k = 2 }
quantity = "v_d"
at_least = 0.5
"""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trace/, cost.json and good.claims.toml, which holds. Read it only."""
    home = tmp_path_factory.mktemp("claims")
    write_trace(generate(IID(0.8), sequences=24, output_tokens=60, depth=8), home / "trace")
    (home / "cost.json").write_text(json.dumps({"s_d": 0.001, "s_t": 0.010}))
    (home / "good.claims.toml").write_text(CLAIMS)
    return home
