"""The choice that a forecast made before anything was decoded, and what it cost; not speculating is a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specsim.io.arrays import Floats
from specsim.replaying.intervals import NO_SPECULATION, beyond_floor
from specsim.replaying.simultaneous import simultaneous


class Forecast(NamedTuple):
    """A policy's speedup as forecast before decoding, and its measured seconds per held-out sequence [S]."""

    label: str
    speedup: float
    seconds: Floats


def choice_of(forecasts: Sequence[Forecast], baseline_s: Floats, floor_percent: float) -> dict[str, Any]:
    """Compare the forecast's best with the measured best, both among all policies and no speculation.

    Parameters
    ----------
    baseline_s : measured seconds per sequence without speculation [S]
    floor_percent : noise floor, below which a difference is not significant

    Returns
    -------
    dict
        "forecast" and "measured", the labels of the two best; "forecast_speedup" and "measured_speedup" of the
        forecast's best; "regret", the measured best's speedup less that; and "significant". Intervals hold for all
        candidates at once, because the best is picked on the same prompts.
    """
    everyone = [Forecast(NO_SPECULATION, 1.0, baseline_s), *forecasts]
    chosen = max(everyone, key=lambda forecast: forecast.speedup)
    best = min(everyone, key=lambda forecast: float(forecast.seconds.sum()))
    places = [number for wanted in (best, chosen) for number, other in enumerate(everyone) if other is wanted]
    measured = simultaneous(baseline_s, [forecast.seconds for forecast in everyone])
    regret = measured.difference(*places)
    speedups = [measured.speedups[place] for place in places]
    return {
        "forecast": chosen.label,
        "forecast_speedup": chosen.speedup,
        "measured_speedup": speedups[1].as_dict(),
        "measured": best.label,
        "regret": regret.difference.as_dict(),
        "significant": regret.significant and beyond_floor(floor_percent, *(speedup.estimate for speedup in speedups)),
    }
