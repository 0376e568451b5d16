"""The README's example policy is a policy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from reference import small_trace

from specsim.cost import ConstantCost
from specsim.prediction import predict

README = Path(__file__).parents[2] / "README.md"


def test_the_example_policy_replays(tmp_path: Path) -> None:
    code = README.read_text().split("```python\n")[1].split("```")[0]
    path = tmp_path / "prob_floor.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("prob_floor", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trace = small_trace()
    few = predict(trace, module.ProbFloor(floor=1.0, max_draft=trace.depth), ConstantCost(1e-3, 5e-3))
    many = predict(trace, module.ProbFloor(floor=0.0, max_draft=trace.depth), ConstantCost(1e-3, 5e-3))
    assert few.drafted / few.rounds <= 1 < many.drafted / many.rounds
