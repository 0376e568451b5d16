"""Tuning: find a policy's best settings on one part of a trace, report on the other."""
