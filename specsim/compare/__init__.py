"""Policies compared: leaderboards, sweeps, hardware."""
