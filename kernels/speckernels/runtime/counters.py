"""Counters that tell the blocks of a launch which of them finishes last."""

from __future__ import annotations

import torch

_FOR_GRAPHS = 1 << 24  # 64 MiB: a grid of models captures millions
_LEAST = 4096

_for_graphs: dict[torch.device, torch.Tensor] = {}
_of_stream: dict[tuple[torch.device, int], torch.Tensor] = {}


def counters(like: torch.Tensor, count: int) -> torch.Tensor:
    """Return at least `count` zeros, int32, on the device of `like`; the kernel has to reset them to zero.

    They are reused, because clearing them would be a second launch. Calls of a stream run in sequence
    and share its counters; a captured call may be replayed concurrently with any other, so it
    gets its own permanently.
    """
    if not like.is_cuda:
        return like.new_zeros(count, dtype=torch.int32)
    device = like.device
    if torch.cuda.is_current_stream_capturing():
        rest = _for_graphs.get(device)
        if rest is None or len(rest) < count:  # no call before the capture, or all in use
            return like.new_zeros(count, dtype=torch.int32)
        _for_graphs[device] = rest[count:]
        return rest[:count]
    if device not in _for_graphs:
        _for_graphs[device] = like.new_zeros(_FOR_GRAPHS, dtype=torch.int32)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _of_stream or len(_of_stream[key]) < count:
        _of_stream[key] = like.new_zeros(max(count, _LEAST), dtype=torch.int32)
    return _of_stream[key]
