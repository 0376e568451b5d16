"""The operations, one folder each: contract, checks, reference, Triton and CUDA backends."""
