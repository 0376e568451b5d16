"""Passes that record a trace: a drafter's proposals at all positions of an output at once."""
