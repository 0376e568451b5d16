"""Benchmark a running server with speculative decoding, and explain what it measures."""
