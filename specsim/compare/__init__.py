"""Policies compared: leaderboards."""
