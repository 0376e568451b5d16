"""Readers under mutated files: `nox -s fuzz`, or `python -m tests.fuzz` for some of them."""
