"""Fits of policies to a trace and its costs."""
