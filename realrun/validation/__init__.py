"""Predicted against measured speedup."""
