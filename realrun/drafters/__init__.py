"""Drafters: one file per mechanism."""
