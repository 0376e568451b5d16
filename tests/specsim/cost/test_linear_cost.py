"""Linear costs, written cost files, and what ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specsim
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.files import read_cost, read_cost_file, shipped_costs
from specsim.cost.linear import LinearCost, LinearPass
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.costs import batch_cost
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of

H100 = "specdecode-bench-llama3.1-8b-eagle-h100"
VLLM = "vllm-llama3.1-8b-eagle-h100"
EDD = "edd-llama2-chat-7b-a6000"
times = st.floats(1e-6, 1.0)


def linear(**changes: Any) -> LinearCost:
    values = {"target": LinearPass(0.006, 2e-5, 4e-8), "drafter": LinearPass(0.002, 1e-6, 2e-9), "step_s": 0.001}
    return LinearCost(**{**values, **changes})


def test_fixed_k_is_a_closed_form() -> None:
    """Every token is accepted: a round of K drafts emits K + 1 tokens, at a context that is known."""
    k, tokens, prompt = 3, 40, 16
    trace = generate(IID(1.0), sequences=1, output_tokens=tokens, depth=8, prompt_tokens=prompt)
    model = linear()
    replayed = specsim.replay(trace, model, "fixed_k", k=k)
    seconds = 0.0
    for start in range(0, tokens, k + 1):
        context = ((prompt - 1 + start) // 16 + 0.5) * 16  # a cost table has a column every 16 tokens
        context = min(max(context, prompt - 1), prompt + tokens - 2)
        drafts = sum(0.002 + 1e-6 + 2e-9 * (context + i) for i in range(k))
        seconds += drafts + 0.006 + (k + 1) * 2e-5 + context * 4e-8 + 0.001
        if start:  # the draft before was accepted whole, so the first step ingests two tokens
            seconds += 1e-6
    assert replayed.speculative_s[0] == pytest.approx(seconds, rel=1e-9)


@given(tokens=st.integers(1, 64), context=st.integers(0, 10_000), batch=st.integers(1, 64), fixed=times, token=times)
def test_more_never_takes_less(tokens: int, context: int, batch: int, fixed: float, token: float) -> None:
    model = linear(target=LinearPass(fixed, token, 1e-8), batch=batch)
    more = linear(target=LinearPass(fixed, token, 1e-8), batch=batch + 1)
    assert model.verify(tokens + 1, context) > model.verify(tokens, context)
    assert model.verify(tokens, context + 1) > model.verify(tokens, context)
    assert more.verify(tokens, context) > model.verify(tokens, context)
    assert more.verify(tokens, context) < 2 * batch * model.verify(tokens, context)
    assert model.draft(tokens + 1, context) > model.draft(tokens, context)


def test_published_constants_are_as_published() -> None:
    """A pass over 4 tokens behind 1,000 cached ones, by hand; drafts are proposed once, whatever their number."""
    model = read_cost(H100)
    assert float(model.verify(4, 1000)) == pytest.approx(
        5.88590713e-3 + 4 * 21.0103129e-6 + 1000 * 39.2645679e-9, rel=1e-12
    )
    for k in (1, 2, 8):
        draft_s = 2.13526175e-3 + (k + 1) * 0.841429603e-6 + 1000 * 2.37768493e-9
        assert float(model.draft(k, 1000)) == pytest.approx(draft_s, rel=1e-12)
    assert model.round_overhead() == 1.20683946e-3
    assert float(model.autoregressive_step(0)) == pytest.approx(
        5.88590713e-3 + 21.0103129e-6 + 1.20683946e-3, rel=1e-12
    )
    batched = read_cost(H100, batch=8)
    assert float(batched.verify(1, 0)) == pytest.approx(5.88590713e-3 + 8 * 21.0103129e-6, rel=1e-12)


def test_a_papers_overhead_is_of_rounds_alone() -> None:
    model = read_cost(EDD)
    assert float(model.autoregressive_step(7)) == pytest.approx(29.8e-3, rel=1e-12)
    assert model.round_overhead() == 4.9e-3 and float(model.draft(5, 7)) == pytest.approx(5.5e-3, rel=1e-12)


@pytest.mark.parametrize("name", shipped_costs())
def test_what_ships_has_a_source_and_prices_a_trace(name: str) -> None:
    document = read_cost_file(shipped_costs()[name])
    assert len(document["source"]) > 20 and document["date"][:2] == "20"
    trace = generate(IID(0.7), sequences=12, output_tokens=40, depth=6)
    prediction = specsim.predict(trace, read_cost(name), "fixed_k", k=3)
    assert 0.5 < prediction.speedup.estimate < 4
    assert (read_cost(name).max_tree_tokens > 0) == (not name.startswith("vllm"))  # whose runs were chains alone


WRITTEN = {
    "kind": "specsim-cost",
    "version": 1,
    "form": "constant",
    "source": "my machine",
    "date": "2026-11-22",
    "s_d": 0.001,
    "s_t": 0.01,
}


LINEAR = {
    **{key: WRITTEN[key] for key in ("kind", "version", "source", "date")},
    "form": "linear",
    "target": {"fixed_s": 0.01, "token_s": 1e-4},
    "drafter": {"fixed_s": 0.001},
}


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (WRITTEN, {"version": 2}, "version"),
    (WRITTEN, {"form": "cubic"}, "form"),
    (WRITTEN, {"s_d": "1 ms"}, "s_d"),
    (WRITTEN, {"s_d": 0.0}, "s_d"),
    (WRITTEN, {"s_t": -1.0}, "s_t"),
    (WRITTEN, {"s_d_ms": 1.0}, "s_d_ms"),
    (WRITTEN, {"round_s": -0.1}, "round_s"),
    (WRITTEN, {"token_s": 0.02}, "fixed_s"),
    (WRITTEN, {"source": None}, "source"),
    (WRITTEN, {"form": "linear"}, "target"),
    (WRITTEN, {"form": "linear", "target": {"fixed_s": 1.0}, "drafter": {"fixed_s": 1.0, "token": 1.0}}, "s_d"),
    (LINEAR, {"proposal": {"cached_token_s": 1e-9}}, "proposal is malformed (Object missing required field `fixed_s`)"),
    (LINEAR, {"proposal": {"fixed_s": 1e-3, "token_s": 1e-9}}, "proposal has an unknown key 'token_s'"),
    (LINEAR, {"proposal": {"fixed_s": -1e-3}}, "fixed_s=-0.001"),
    (LINEAR, {"fitted": {}}, "fitted is malformed (Object missing required field `batches`)"),
    (LINEAR, {"fitted": {"batches": [1]}}, "batches=[1]; give the smallest and the largest"),
    (LINEAR, {"fitted": {"batches": [8, 1]}}, "batches=[8, 1]; give the smallest and the largest"),
    (LINEAR, {"fitted": {"batches": [1, 8], "draft_tokens": [0, 3]}}, "draft_tokens=[0, 3]; give the smallest"),
    (LINEAR, {"fitted": {"batches": [1, 8], "k": [1, 3]}}, "fitted has an unknown key 'k'"),
]


@pytest.mark.parametrize(("document", "changes", "word"), WRONG)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, document: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**document, **changes}))
    refusal(lambda: read_cost(path), word, str(path))


def test_a_written_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(WRITTEN))
    assert read_cost(path) == specsim.ConstantCost(0.001, 0.01)
    path.write_text(json.dumps({**WRITTEN, "token_s": 1e-4}))
    assert np.allclose([read_cost(path).verify(n, 9) for n in (1, 5)], [0.01, 0.0104])
    path.write_text(json.dumps(WRITTEN))
    with pytest.raises(InputError, match="batches"):
        read_cost(path, batch=2)
    with pytest.raises(InputError, match="cost list"):
        read_cost("vllm-unheard-of")


def test_a_proposal_is_paid_once_a_round_and_only_by_rounds_that_draft(tmp_path: Path) -> None:
    """In replays and in batches. Nothing is accepted: 40 tokens are 40 rounds, of which the last drafts none."""
    path = tmp_path / "cost.json"
    trace = generate(IID(0.0), sequences=1, output_tokens=40, depth=4)
    seconds = {}
    for proposal_s in (0.0, 0.002):
        path.write_text(json.dumps({**LINEAR, "proposal": {"fixed_s": proposal_s}}))
        model = read_cost(path)
        for k in (1, 4):
            seconds[proposal_s, k, "replay"] = float(specsim.replay(trace, model, "fixed_k", k=k).speculative_s[0])
            served = lockstep(drafts_of(trace, FixedK(k=k)), batch_cost(model), 1)
            seconds[proposal_s, k, "lockstep"] = served.total_s
    for k in (1, 4):
        for way in ("replay", "lockstep"):
            assert seconds[0.002, k, way] - seconds[0.0, k, way] == pytest.approx(39 * 0.002, rel=1e-9)


def test_what_costs_were_fitted_to_is_said_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**LINEAR, "fitted": {"batches": [1, 64], "draft_tokens": [2, 7]}}))
    assert read_cost(path, batch=64).notes(5, (0, 100)) == []
    assert read_cost(path, batch=65).notes(8, (0, 100)) == [
        "extrapolated: batch 65, fitted to 1 to 64",
        "extrapolated: drafts of 8 tokens, fitted to 2 to 7",
    ]
    assert "which K" in read_cost(H100).notes(3, (0, 100))[0]
    assert read_cost(VLLM, batch=1) == read_cost(VLLM)
    with pytest.raises(InputError, match=r"measured at batch 1 alone, which says nothing of batch 8; use costs of"):
        read_cost(VLLM, batch=8)
    path.write_text(json.dumps(LINEAR))  # as before these keys were known
    assert read_cost(path, batch=65).notes(8, (0, 100)) == []


def test_the_commands(tmp_path: Path) -> None:
    assert set(json_of(call("specsim", "cost", "list", "--json"))) == set(shipped_costs())
    assert H100 in call("specsim", "cost", "list").out
    (row,) = json_of(call("specsim", "cost", "show", H100, "--contexts", "1000", "--tokens", "4", "--json"))["rows"]
    assert row["verify_s"] == {"4": pytest.approx(float(read_cost(H100).verify(4, 1000)))}
    assert "s_d / s_t" in call("specsim", "cost", "show", EDD).out
    assert (row["proposal_s"], row["draft_step_s"]) == pytest.approx((2.1384808645e-3, 8.41429603e-7))
    assert "proposal" in call("specsim", "cost", "show", H100).out.replace("┃", "")
    assert_refused(call("specsim", "cost", "show", "nothing"), "nothing")
