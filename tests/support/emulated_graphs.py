"""A device that counts what it is asked, and CUDA graphs without a GPU: operations, run again on the same memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import realrun.lm.static.llama
from realrun.lm.static.graphs import WARM_UP_RUNS, Results
from realrun.lm.static.sizes import Mirrored

READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__")  # what brings a tensor's numbers to the host
NOTHING = ("empty", "new_empty", "empty_strided", "lift_fresh", "detach", "alias")  # operations that launch nothing
ASKS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Device(TorchDispatchMode):
    """Counts what would be asked of a GPU: graphs, launches beside them, copies of inputs to it, bytes back."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs = self.puts = self.bytes_back = self.captured = 0
        self.launches = Counter[str]()
        self.tape: list[tuple[Any, Any, Any, Any]] | None = None
        self.replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        assert name not in ASKS or not self.replaying, f"a recorded pass asks the device: {name}"
        if self.tape is not None:
            self.tape.append((func, args, kwargs or {}, result))
        elif not self.replaying and name not in NOTHING and not is_view(func):
            self.launches[name] += 1
        return result

    @property
    def counts(self) -> dict[str, int]:
        return {
            "graphs": self.graphs,
            "launches": self.launches.total(),
            "puts": self.puts,
            "bytes back": self.bytes_back,
        }


def is_view(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Graphs:
    """Stands in for `realrun.lm.static.graphs.Graphs`.

    What a graph makes on its way is spoilt after every replay, as other graphs may use its memory, and host code does
    not run again.
    """

    def __init__(self, device: Device):
        self.device = device

    def capture(self, run: Callable[[], Results], changed: Iterable[torch.Tensor] = ()) -> Callable[[], Results]:
        device, changed = self.device, [*changed]
        device.captured += 1
        device.replaying = True
        for number in range(WARM_UP_RUNS + 1):
            before = [tensor.clone() for tensor in changed]
            device.tape = [] if number == WARM_UP_RUNS else None
            results = run()
            tape, device.tape = device.tape, None
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        device.replaying = False
        assert tape is not None
        kept, calls, made = {address(tensor) for tensor in results}, [], []
        for func, args, kwargs, out in tape:
            given = {address(tensor) for tensor in tensors_of((args, kwargs))}
            own = [address(tensor) not in given for tensor in tensors_of(out)]
            calls.append((func, args, kwargs, tensors_of(out), own))
            made += [
                tensor
                for tensor, fresh in zip(tensors_of(out), own, strict=True)
                if fresh and address(tensor) not in kept
            ]

        def replay() -> Results:
            device.graphs += 1
            device.replaying = True
            for func, args, kwargs, out, own in calls:
                again = func(*args, **kwargs)
                if any(own):
                    for old, new, fresh in zip(out, tensors_of(again), own, strict=True):
                        if fresh:
                            old.copy_(new)
            for tensor in made:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
            device.replaying = False
            return results

        return replay


@contextmanager
def emulated() -> Iterator[Device]:
    """Static passes that are made inside are recorded, and what they ask of their device is counted."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realrun.lm.static.llama, "Graphs", lambda _: Graphs(device))
        made = realrun.lm.static.llama.StaticLlama.__init__

        def recorded(lm: Any, *args: Any, graphs: bool | None = None, **options: Any) -> None:
            made(lm, *args, graphs=True if graphs is None else graphs, **options)

        patch.setattr(realrun.lm.static.llama.StaticLlama, "__init__", recorded)
        for name in READS:
            patch.setattr(torch.Tensor, name, counted_read(device, getattr(torch.Tensor, name)))
        put = Mirrored.put

        def counted_put(mirrored: Mirrored, numbers: Any) -> None:
            assert device.tape is None, "a graph does not read from the host"
            device.puts += 1
            put(mirrored, numbers)

        patch.setattr(Mirrored, "put", counted_put)
        with device:
            yield device


def counted_read(device: Device, read: Callable[..., Any]) -> Callable[..., Any]:
    def counted(tensor: torch.Tensor, *args: Any) -> Any:
        assert not device.replaying, "a recorded pass asks the device"
        device.bytes_back += tensor.nbytes
        replaying, device.replaying = device.replaying, True
        try:
            return read(tensor, *args)
        finally:
            device.replaying = replaying

    return counted
