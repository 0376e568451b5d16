"""Scripted acceptance: rounds of a trace at true model shapes, whose weights are random."""
