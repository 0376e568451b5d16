"""Policies compared: leaderboards, sensitivity, sweeps, hardware."""
