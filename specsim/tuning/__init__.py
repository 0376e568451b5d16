"""Tuning: find a policy's best settings on one part of a trace, report on the other."""

from specsim.tuning.search import TuneResult, tune
from specsim.tuning.split import split_sequences

__all__ = ["TuneResult", "split_sequences", "tune"]
