"""Targets other than they were trained: tuned with a drafter, with sublayers skipped, with blocks added."""
