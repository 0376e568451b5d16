"""CUDA graphs: a function's launches, recorded once and replayed with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UP_RUNS = 2  # before the recording: libraries load and kernels compile


class Graphs:
    """Graphs of one device that share a memory pool, as no two of them run at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Record `run`, which reads and writes tensors at fixed addresses and never asks the device.

        It runs a few times before, so it must do no harm when repeated.
        """
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                for _ in range(WARM_UP_RUNS):
                    run()
            here.wait_stream(self.side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
                result = run()
        return Replay(graph, result)


class Replay:
    """A recorded function. Its result lies at a fixed address: the next call overwrites it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor):
        self.graph = graph
        self.result = result

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.result
