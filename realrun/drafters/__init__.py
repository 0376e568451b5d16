"""Drafters: a file per mechanism."""
