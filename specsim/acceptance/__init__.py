"""Acceptance models: from little data to dense traces. A new one is a file like `iid.py` and a line here."""

from __future__ import annotations

from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.files import MODELS, load_model, save_model
from specsim.acceptance.goodness import FitReport, fit_report
from specsim.acceptance.iid import IID
from specsim.acceptance.per_position import PerPosition
from specsim.acceptance.sources import Counters, Rounds, read_counters, read_rounds, read_source
from specsim.acceptance.synthetic import AcceptanceModel, generate

__all__ = [
    "IID",
    "MODELS",
    "AcceptanceModel",
    "Counters",
    "Difficulty",
    "FitReport",
    "PerPosition",
    "Rounds",
    "fit_report",
    "generate",
    "load_model",
    "read_counters",
    "read_rounds",
    "read_source",
    "save_model",
]
