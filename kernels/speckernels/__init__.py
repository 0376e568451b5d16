"""GPU kernels of speculative decoding. Empty so far: the real run uses plain torch operations."""
