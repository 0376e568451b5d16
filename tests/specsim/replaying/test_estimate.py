"""An estimate is a number that carries its interval."""

from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pandas as pd
import pytest

import specsim
from specsim.replaying.intervals import Estimate

SPEEDUP = Estimate(1.25, 1.1, 1.4)


def test_a_predicted_speedup_is_compared_formatted_and_converted() -> None:
    speedup = specsim.predict("example:lab-model", "example:lab-deep-model", "fixed_k", k=3).speedup
    assert speedup > 1.1 and not speedup > 5 and 1.0 < speedup < 2
    assert f"{speedup:.2f}" == f"{speedup.estimate:.2f}" and f"{speedup:8.3f}".strip() == f"{speedup.estimate:.3f}"
    assert float(speedup) == speedup.estimate and round(speedup, 2) == round(speedup.estimate, 2)
    assert speedup.low < speedup < speedup.high
    assert str(speedup) == f"{speedup}" == f"{speedup.estimate:.3f} [{speedup.low:.3f}, {speedup.high:.3f}]"


def test_arithmetic_is_the_number_s() -> None:
    for value, number in ((SPEEDUP - 1, 0.25), (2 * SPEEDUP, 2.5), (1 / SPEEDUP, 0.8), (SPEEDUP / SPEEDUP, 1.0)):
        assert value == number and type(value) is float
    assert math.sqrt(Estimate(4.0, 1.0, 9.0)) == 2 and max(SPEEDUP, Estimate(1.3, 0.2, 2.0)).low == 0.2
    assert sum([SPEEDUP, SPEEDUP]) == 2.5


def test_numpy_and_pandas_take_it_for_a_float() -> None:
    column = np.array([SPEEDUP, Estimate(2.0, 1.0, 3.0)])
    assert column.dtype == np.float64 and column.mean() == 1.625
    frame = pd.DataFrame({"speedup": [SPEEDUP, SPEEDUP]})
    assert frame["speedup"].dtype == np.float64 and frame["speedup"].sum() == 2.5


def test_it_equals_its_number_and_an_estimate_with_the_same_interval() -> None:
    assert SPEEDUP == 1.25 and SPEEDUP == 1.25 and hash(SPEEDUP) == hash(1.25) and {SPEEDUP: "x"}[1.25] == "x"
    assert SPEEDUP != 1.3 and SPEEDUP != "1.25" and SPEEDUP == 1.25
    assert Estimate(1.25, 1.1, 1.4) == SPEEDUP and Estimate(1.25, 0.0, 9.0) != SPEEDUP


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_keep_the_interval(again) -> None:
    assert again(SPEEDUP).as_dict() == {"estimate": 1.25, "low": 1.1, "high": 1.4}


def test_its_json_form_keeps_the_interval_and_it_cannot_be_changed() -> None:
    assert json.loads(json.dumps(SPEEDUP.as_dict()))["high"] == 1.4
    with pytest.raises(AttributeError):
        SPEEDUP.low = 0.0
