"""Passes over static caches: fixed addresses, kernels for attention, CUDA graphs.

The fused pass asks the host for every length; these keep the lengths on the device, so that their launches depend
only on the shape [B, n] of the new tokens. On a GPU they are recorded once per shape and replayed with a single call.
The autoregressive baseline is n = 1.

    sizes   inputs that the host writes for a pass of n rows
    graphs  recording and replay of passes
    llama   a whole model, and its layers with their keys and values
    split   a target whose lower layers a drafter shares
"""
