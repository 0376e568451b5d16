"""Benchmark of the operations; `pytest kernels/benchmarks --benchmark-only` runs it.

The floor of a shape is the largest of bytes over copy bandwidth, operations over matrix rate, and launch latency, all
three measured in the same run.
"""
