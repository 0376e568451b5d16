"""Passes over static caches: fixed addresses, kernels for attention, CUDA graphs.

The fused pass asks the host for every length; these keep the lengths on the device, so that their launches depend on
the shape [B, n] of the new tokens only. On a GPU they are recorded once per shape and replayed with one call. The
autoregressive baseline is n = 1.

    sizes   what a pass of n rows is told by the host
    stack   consecutive layers with their keys and values
    graphs  passes recorded, and replayed
    llama   a whole model
    split   a target whose lower layers a drafter shares
"""
