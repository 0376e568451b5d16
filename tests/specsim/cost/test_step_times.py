"""Step times: known forms are found again, what a form cannot say shows on held-out steps, and files are checked."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost import step_times
from specsim.cost.linear import LinearPass
from specsim.cost.step_times import FORMS, Steps, fit_step_time, judge_step_times, profile_steps
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
    return {one.fitted.form: one.median_error for one in judge_step_times(steps)}


def test_linear_constants_are_found_exactly() -> None:
    found = fit_step_time(taking(TRUTHS["linear"]), "linear").as_dict()
    assert list(found) == ["form", "fixed_s", "token_s", "cached_token_s"]
    for name in ("fixed_s", "token_s", "cached_token_s"):
        assert found[name] == pytest.approx(getattr(H100, name), rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_form_that_is_true_is_found_on_held_out_steps(form: str) -> None:
    errors = median_errors(taking(TRUTHS[form]))
    assert errors[form] < 0.01
    for other, error in errors.items():
        # A straight line is a curve, too.
        assert other == form or error > 0.02 or (form == "linear" and other == "tokens, cached" and error < 0.01)


def test_curves_by_hand() -> None:
    """Seconds 1, 2, 2 and 6 at 1, 2, 4 and 8 tokens of one sequence: linear between and beyond, flat below."""
    tokens = np.array([1.0, 2.0, 4.0, 8.0])
    steps = Steps(np.ones(4), tokens, np.zeros(4), np.array([1.0, 2.0, 2.0, 6.0]))
    found = fit_step_time(steps, "batch, tokens")
    assert found.fixed_s == pytest.approx(1.0)
    assert found.as_dict()["tokens"] == {"at": [1, 2, 4, 8], "seconds": pytest.approx([0, 1, 1, 5])}
    assert found.as_dict()["sequences"] == {"at": [1.0], "seconds": [0.0]}
    asked = Steps(np.ones(4), np.array([0.5, 3.0, 6.0, 10.0]), np.zeros(4), np.ones(4))
    assert found.seconds(asked) == pytest.approx([1.0, 2.0, 4.0, 8.0])


def test_the_example_is_right() -> None:
    found = doctest.testmod(step_times)
    assert found.attempted == 6 and found.failed == 0


def test_noise_does_not_make_a_curve_fall() -> None:
    steps = taking(lambda b, n, c: 0.01 * np.exp(0.3 * np.random.default_rng(1).standard_normal(len(n))))
    for form in FORMS:
        fitted = fit_step_time(steps, form)
        assert fitted.fixed_s >= 0 and all((curve.rise_s >= 0).all() for curve in fitted.curves.values())


def test_held_out_steps_are_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats of a step are on one side, so that no step is judged by what it was itself."""
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
    assert done["steps"] == 400 and [one["fitted"]["form"] for one in done["forms"]] == [*FORMS]
    linear = done["forms"][0]
    assert linear["median_error"] < 1e-6 and linear["rmse_s"] < 1e-6 and 150 < linear["held_out"] < 250
    shown = call("specsim", "cost", "fit", path)
    assert shown.code == 0 and "cached token 3.926e-05" in shown.out
    (tmp_path / "profile.json").write_text(json.dumps(document()))
    assert json_of(call("specsim", "cost", "fit", tmp_path / "profile.json", "--json"))["steps"] == 18


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
        "": ("no CSV file",),
    }.items():
        path.write_text(text)
        assert_refused(call("specsim", "cost", "fit", path), *words)
    (tmp_path / "cost.json").write_text('{"s_d": 0.001, "s_t": 0.01}')
    assert_refused(call("specsim", "cost", "fit", tmp_path / "cost.json"), "no batch profile", "batch-profile")
    refusal(lambda: judge_step_times(drawn(5)), "at least 8")
