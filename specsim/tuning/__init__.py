"""Tuning: find a policy's best settings on one part of a trace, report on the other."""

from specsim.tuning.crossval import CrossValidation, cross_validate
from specsim.tuning.evaluate import Evaluated, evaluate_many
from specsim.tuning.search import Found, Search, TuneResult, find_best, tune
from specsim.tuning.split import split_sequences

__all__ = [
    "CrossValidation",
    "Evaluated",
    "Found",
    "Search",
    "TuneResult",
    "cross_validate",
    "evaluate_many",
    "find_best",
    "split_sequences",
    "tune",
]
