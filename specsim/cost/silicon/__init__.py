"""Costs from NVIDIA's measured operator latencies."""
