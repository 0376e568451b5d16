"""Batches and serving: what speculation is worth when several sequences share every pass."""
