"""Step times: known forms are found again, what a form cannot say shows on held-out steps, and files are checked."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.iid import IID
from specsim.cost import step_times
from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost, with_batch
from specsim.cost.linear import LinearPass
from specsim.cost.step_times import FORMS, Steps, fit_step_time, judge_step_times
from specsim.learn.recorded_steps import profile_steps
from specsim.serving.costs import batch_cost
from specsim.trace.files import write_trace
from tests.specsim.cost.test_batch_profile import document, read
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of

H100 = LinearPass(5.88590713e-3, 21.0103129e-6, 39.2645679e-9)


def drawn(count: int = 400) -> Steps:
    """Steps of 1 to 64 sequences, each with 1 to 6 new tokens and its own context; their seconds are yet to be made."""
    rng = np.random.default_rng(0)
    sequences = 2.0 ** rng.integers(0, 7, count)
    tokens = sequences * rng.integers(1, 7, count)
    return Steps(sequences, tokens, sequences * rng.integers(100, 3000, count), np.ones(count))


def taking(seconds: Any) -> Steps:
    steps = drawn()
    return steps._replace(seconds=np.asarray(seconds(*steps[:3])))


def hockey(tokens: Any) -> Any:
    """A pass that reads weights up to 96 tokens, and computes beyond."""
    return 5e-3 + 4e-5 * np.maximum(tokens - 96, 0)


TRUTHS = {
    "linear": lambda b, n, c: H100.fixed_s + H100.token_s * n + H100.cached_token_s * c,
    "tokens, cached": lambda b, n, c: hockey(n) + 4e-8 * c,
    "batch, tokens": lambda b, n, c: 1e-3 * np.log2(2 * b) + hockey(n),
}


def median_errors(steps: Steps) -> dict[str, float]:
    return {judged.form: judged.median_error for judged in judge_step_times(steps)}


def test_linear_constants_are_found_exactly() -> None:
    constants = fit_step_time(taking(TRUTHS["linear"]), "linear").as_dict()
    assert list(constants) == ["fixed_s", "token_s", "cached_token_s"]
    for name in ("fixed_s", "token_s", "cached_token_s"):
        assert constants[name] == pytest.approx(getattr(H100, name), rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_form_that_is_true_is_found_on_held_out_steps(form: str) -> None:
    errors = median_errors(taking(TRUTHS[form]))
    assert errors[form] < 0.01
    for other, error in errors.items():
        # A straight line is a curve, too.
        assert other == form or error > 0.02 or (form == "linear" and other == "tokens, cached" and error < 0.01)


def test_curves_by_hand() -> None:
    """Seconds 1, 2, 2 and 6 at 1, 2, 4 and 8 tokens of a sequence: linear between and beyond, flat below."""
    tokens = np.array([1.0, 2.0, 4.0, 8.0])
    steps = Steps(np.ones(4), tokens, np.zeros(4), np.array([1.0, 2.0, 2.0, 6.0]))
    fitted = fit_step_time(steps, "batch, tokens")
    assert fitted.fixed_s == pytest.approx(1.0)
    assert fitted.as_dict()["tokens"] == {"at": [1, 2, 4, 8], "seconds": pytest.approx([0, 1, 1, 5])}
    assert fitted.as_dict()["sequences"] == {"at": [1.0], "seconds": [0.0]}
    asked = Steps(np.ones(4), np.array([0.5, 3.0, 6.0, 10.0]), np.zeros(4), np.ones(4))
    assert fitted.seconds(asked) == pytest.approx([1.0, 2.0, 4.0, 8.0])


def test_the_example_is_right() -> None:
    tests = doctest.testmod(step_times)
    assert tests.attempted == 5 and tests.failed == 0


def test_noise_does_not_make_a_curve_fall() -> None:
    steps = taking(lambda b, n, c: 0.01 * np.exp(0.3 * np.random.default_rng(1).standard_normal(len(n))))
    for form in FORMS:
        fitted = fit_step_time(steps, form)
        assert fitted.fixed_s >= 0 and all((curve.rise_s >= 0).all() for curve in fitted.curves.values())


def test_held_out_steps_are_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats of a step are on the same side, so that no step is judged by what it was itself."""
    sides: list[set[tuple[float, ...]]] = []

    def noted(steps: Steps, form: str) -> Any:
        sides.append(set(zip(*(column.tolist() for column in steps[:3]), strict=True)))
        return fit_step_time(steps, form)

    monkeypatch.setattr("specsim.cost.step_times.fit_step_time", noted)
    steps = taking(TRUTHS["linear"])
    twice = Steps(*(np.concatenate([column, column]) for column in steps))
    judged = judge_step_times(twice)
    train, whole = sides[0], sides[1]
    assert abs(len(train) - len(whole) / 2) <= 0.5
    # Every step that was not seen counts, with all of its repeats.
    rows = [*zip(*(column.tolist() for column in twice[:3]), strict=True)]
    assert judged[0].held_out == sum(row not in train for row in rows)


def test_a_batch_profile_is_a_list_of_steps(tmp_path: Path) -> None:
    steps = profile_steps(read(tmp_path))
    assert len(steps.seconds) == 3 * 2 * 3
    (row,) = np.flatnonzero((steps.sequences == 8) & (steps.tokens == 40) & (steps.cached_tokens == 2400))
    assert steps.seconds[row] == pytest.approx(0.01 + 1e-3 * 40 + 1e-6 * 2400 + 1e-3)
    errors = median_errors(steps)
    assert errors["linear"] < 1e-6 and errors["batch, tokens"] > 1e-4


def test_the_command_says_which_form_fits(tmp_path: Path) -> None:
    steps, path = taking(TRUTHS["linear"]), tmp_path / "steps.csv"
    np.savetxt(path, np.stack(steps, axis=1), delimiter=",", header=",".join(Steps._fields), comments="", fmt="%.17g")
    done = json_of(call("specsim", "cost", "fit", path, "--json"))
    assert done["steps"] == 400 and [form["form"] for form in done["forms"]] == [*FORMS]
    linear = done["forms"][0]
    assert linear["median_error"] < 1e-6 and linear["rmse_s"] < 1e-6 and 150 < linear["held_out"] < 250
    shown = call("specsim", "cost", "fit", path)
    assert shown.code == 0 and "cached token 3.926e-05" in shown.out
    (tmp_path / "profile.json").write_text(json.dumps(document()))
    assert json_of(call("specsim", "cost", "fit", tmp_path / "profile.json", "--json"))["steps"] == 18


CURVE = {"at": [1, 96, 256], "seconds": [0, 1e-3, 7.4e-3]}


def written(folder: Path, target: dict[str, Any], drafter: dict[str, Any] | None = None) -> Path:
    """A cost file of the form linear."""
    path = folder / "cost.json"
    about = {"kind": "specsim-cost", "version": 1, "form": "linear", "source": "a test", "date": "2026-11"}
    path.write_text(json.dumps({**about, "target": target, "drafter": drafter or {"fixed_s": 0.002}, "step_s": 0.001}))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_fitted_form_is_the_target_of_a_cost_file(form: str, tmp_path: Path) -> None:
    fitted = fit_step_time(taking(TRUTHS["batch, tokens"]), form)
    cost = batch_cost(read_cost(written(tmp_path, fitted.as_dict())))
    steps = drawn()
    seconds = cost.batch_verify(BatchTokens(steps.sequences, steps.tokens, steps.cached_tokens, steps.tokens))
    assert seconds == pytest.approx(fitted.seconds(steps), rel=1e-12)
    at_eight = with_batch(read_cost(tmp_path / "cost.json"), 8)
    step = Steps(np.array([8.0]), np.array([24.0]), np.array([4000.0]), np.ones(1))
    assert float(at_eight.verify(3, 500)) == pytest.approx(float(fitted.seconds(step)[0]), rel=1e-12)


def test_curves_price_servers(tmp_path: Path) -> None:
    """A pass over 48 tokens of 48 sequences, 47/95 of the way to 96; and a draft step by the same curve."""
    path = written(
        tmp_path, {"fixed_s": 0.01, "tokens": CURVE, "cached_token_s": 1e-8}, {"fixed_s": 1e-3, "tokens": CURVE}
    )
    cost = batch_cost(read_cost(path))
    held = BatchTokens.alike(48, 1, 100)
    assert float(cost.batch_verify(held)) == pytest.approx(0.01 + 1e-3 * 47 / 95 + 4800e-8)
    assert float(cost.batch_draft(0, held)) == pytest.approx(1e-3 + 1e-3 * 47 / 95)
    write_trace(generate(IID(0.7), sequences=4, output_tokens=12, depth=3), tmp_path / "trace")
    given = ["specsim", "serve", "schedule", tmp_path / "trace", "--cost", path, "--batch", "1,64", "--json"]
    assert len(json_of(call(*given))["cells"]) == 2


def test_curves_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    for changes, words in [
        ({"tokens": {"at": [1, 1], "seconds": [0, 1]}}, ("tokens at", "increasing")),
        ({"tokens": {"at": [], "seconds": []}}, ("tokens at", "increasing")),
        ({"tokens": {"at": [1, 2], "seconds": [0, -1]}}, ("do not rise from 0",)),
        ({"tokens": {"at": [1, 2], "seconds": [1, 2]}}, ("do not rise from 0",)),
        ({"sequences": {"at": [1, 2], "seconds": [0]}}, ("sequences have seconds",)),
        ({"tokens": {"at": [1, 2]}}, ("required field `seconds`",)),
        ({"tokens": {**CURVE, "rise": 1}}, ("unknown key 'rise'",)),
        ({"tokens": CURVE, "token_s": 1e-3}, ("token_s and tokens", "give either")),
        ({"tokens": CURVE, "cached_token_s": -1e-9}, ("cached_token_s=-1e-09",)),
        ({"tokens": CURVE, "fixed_s": 0.0}, ("fixed_s=0",)),
    ]:
        refusal(lambda changes=changes: read_cost(written(tmp_path, {"fixed_s": 0.01, **changes})), "cost.json", *words)


def test_what_holds_no_steps_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    head = "sequences,tokens,cached_tokens,seconds\n"
    assert_refused(call("specsim", "cost", "fit", path), "does not exist", "sequences,tokens,cached_tokens,seconds")
    for text, words in {
        "a,b\n1,2\n": ("columns a, b",),
        head + "1,1,10,0.1\n2,1,10,0.1\n": ("line 3", "sequences=2"),
        head + "1,1,10,-0.1\n": ("line 2", "seconds=-0.1"),
        head + "1,many,10,0.1\n": ("line 2", "tokens=many"),
        head + "1,1,-10,0.1\n": ("cached_tokens=-10",),
        head + "1,1,10,inf\n": ("seconds=inf",),
        head + "1,1,10,0.1\n" * 20: ("1 distinct steps", "at least 8"),
        head + "1,1,10,0.1,5\n": ("more cells",),
        head: ("0 distinct steps",),
        "": ("not a CSV file",),
    }.items():
        path.write_text(text)
        assert_refused(call("specsim", "cost", "fit", path), *words)
    (tmp_path / "cost.json").write_text('{"s_d": 0.001, "s_t": 0.01}')
    assert_refused(call("specsim", "cost", "fit", tmp_path / "cost.json"), "not a batch profile", "batch-profile")
    refusal(lambda: judge_step_times(drawn(5)), "at least 8")
