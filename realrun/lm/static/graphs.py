"""CUDA graphs: a function's launches, recorded once and replayed with a single call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

WARM_UP_RUNS = 1  # before the recording: libraries load and kernels compile
Results = tuple[torch.Tensor, ...]


class Graphs:
    """Graphs of a device that share a memory pool because no two of them run at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], Results], changed: Iterable[torch.Tensor] = ()) -> Replay:
        """Record `run`, which reads and writes tensors at fixed addresses and never asks the device.

        It runs a few times before, so it must be repeatable.

        changed : tensors that it both reads and changes; they are restored after each of these runs
        """
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                for _ in range(WARM_UP_RUNS):
                    before = [(tensor, tensor.clone()) for tensor in changed]
                    run()
                    for tensor, value in before:
                        tensor.copy_(value)
            here.wait_stream(self.side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
                results = run()
        return Replay(graph, results)


class Replay:
    """A recorded function. Its results lie at fixed addresses, where the next call overwrites them."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Results):
        self.graph = graph
        self.results = results

    def __call__(self) -> Results:
        self.graph.replay()
        return self.results


class Recorded:
    """Passes by key, each recorded when it first runs; without graphs they run eagerly."""

    def __init__(self, graphs: Graphs | None):
        self.graphs = graphs
        self.replays: dict[Hashable, Replay] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self.replays

    def run(self, key: Hashable, function: Callable[[], Results], changed: Iterable[torch.Tensor] = ()) -> Results:
        """Run the function or its graph; `changed` are tensors that it both reads and changes."""
        if self.graphs is None:
            return function()
        if key not in self.replays:
            self.replays[key] = self.graphs.capture(function, changed)
        return self.replays[key]()

    def forget(self, part: object) -> None:
        """Drop the passes whose keys have this part."""
        self.replays = {
            key: replay for key, replay in self.replays.items() if not (isinstance(key, tuple) and part in key)
        }

    def drop(self) -> None:
        """Drop all passes because the buffers that they read have moved."""
        self.replays.clear()
