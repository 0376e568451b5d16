"""Ceilings of hardware, as datasheets print them, and what of them is reached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from specsim.errors import InputError
from specsim.json_files import checked

DATASHEETS = Path(__file__).parent / "hardware.json"
INVALID = "give memory_bytes_s and flops, or a name"
BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "float8": 8.0, "int8": 8.0, "int4": 4.0 + 16 / 128}
"""Bits a weight; of int4 with a 16-bit scale for every 128 weights. Scales per channel do not count."""


class HardwareDocument(TypedDict):
    """Of a machine that a person writes down, see `Hardware`."""

    memory_bytes_s: float
    flops: dict[str, float]
    memory_bytes: NotRequired[float]
    link_bytes_s: NotRequired[float]
    title: NotRequired[str]
    source: NotRequired[str]
    date: NotRequired[str]


@dataclass(frozen=True)
class Hardware:
    """One device's ceilings.

    Parameters
    ----------
    name : str
        As errors call it.
    memory_bytes_s : float
        Memory bandwidth.
    flops : mapping of str to float
        FLOP/s of dense matrix products, by dtype.
    memory_bytes : float, optional
        Memory; 0: it does not limit.
    link_bytes_s : float, optional
        Bandwidth to other devices of its kind, in one direction; 0: there are none.
    title, source, date : str, optional
        In full, and where the numbers are from.

    Raises
    ------
    InputError
        For a ceiling that is not positive.

    Examples
    --------
    >>> from specsim.cost.roofline.hardware import find_hardware
    >>> find_hardware("h100").memory_bytes_s
    3350000000000.0
    """

    name: str
    memory_bytes_s: float
    flops: Mapping[str, float]
    memory_bytes: float = 0.0
    link_bytes_s: float = 0.0
    title: str = ""
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        ceilings = {"memory_bytes_s": self.memory_bytes_s, **self.flops}
        for name, value in ceilings.items():
            if not 1.0 <= value <= 1e24:  # also catches NaN
                raise InputError(f"hardware {self.name}: {name}={value} is no ceiling a second; give a positive one")
        for name in ("memory_bytes", "link_bytes_s"):
            if not 0 <= getattr(self, name) <= 1e24:
                raise InputError(f"hardware {self.name}: {name}={getattr(self, name)}; give at least 0")

    def flops_of(self, dtype: str) -> float:
        """FLOP/s in this dtype; InputError where nobody has printed it."""
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise InputError(f"hardware {self.name} has no throughput in {dtype}; choose one of {known}")
        return self.flops[dtype]


@dataclass(frozen=True)
class Derating:
    """What of the ceilings is reached, and what an operation takes beside them.

    Parameters
    ----------
    memory, compute : float
        Shares of memory bandwidth and matrix throughput that are reached, above 0, at most 1.
    launch_s : float
        Seconds to start one operation.
    overlap : float
        Share of the shorter one of reading and computing that hides behind the longer one. 1 is the roofline; a
        processor that waits for memory before it computes has less.

    Raises
    ------
    InputError
        For a number outside of its range.

    Examples
    --------
    >>> from specsim.cost.roofline.hardware import Derating
    >>> Derating(memory=0.8, compute=0.7, launch_s=3e-6).overlap
    1.0
    """

    memory: float = 1.0
    compute: float = 1.0
    launch_s: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, low = getattr(self, field.name), 1e-6 if field.name in ("memory", "compute") else 0.0
            if not low <= value <= 1:
                raise InputError(f"derating: {field.name}={value}; give {'above' if low else 'at least'} 0, at most 1")


@cache
def _datasheets() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DATASHEETS.read_text())
    return document


@cache
def usual_derating() -> Derating:
    """What is reached where nothing was measured; its source stands beside it."""
    found = _datasheets()["derating"]
    return Derating(**{field.name: found[field.name] for field in fields(Derating)})


@cache
def known_hardware() -> dict[str, Hardware]:
    """Devices by name, each with its source.

    Examples
    --------
    >>> from specsim.cost.roofline.hardware import known_hardware
    >>> known_hardware()["a6000"].title
    'NVIDIA RTX A6000'
    """
    return {name: Hardware(name, **entry) for name, entry in _datasheets()["hardware"].items()}


def find_hardware(hardware: str | Mapping[str, Any]) -> Hardware:
    """A device by name, or of what a person wrote down; InputError says what is wrong."""
    if isinstance(hardware, str):
        if hardware not in known_hardware():
            raise InputError(f"hardware {hardware!r} is unknown; known: {', '.join(known_hardware())}")
        return known_hardware()[hardware]
    checked(hardware, "hardware", HardwareDocument, invalid=INVALID)
    for key in hardware:
        if key not in HardwareDocument.__annotations__:
            known = ", ".join(HardwareDocument.__annotations__)
            raise InputError(f"hardware has an unknown key {key!r}, which would mean nothing; known: {known}")
    return Hardware(hardware.get("title") or "inline", **hardware)
