"""Choosing, building and launching backends."""
