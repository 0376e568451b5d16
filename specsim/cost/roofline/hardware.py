"""Ceilings of hardware, as datasheets print them, and the share of them that is reached."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from specsim.io.errors import InputError
from specsim.io.json import check_keys, from_keys
from specsim.io.names import find_name, known_name

DATASHEETS = Path(__file__).parent / "hardware.json"
LARGEST_CEILING = 1e24
PCIE_BYTES_S = 64e9  # bandwidth of PCIe 5.0 x16 per direction; bridges of pairs of consumer GPUs are not faster
# Published decoding steps on 4 and 8 RTX PRO 6000 take 10 to 20 us per all-reduce longer than with NVLink.
PCIE_ALL_REDUCE_S = 20e-6
SEVERAL = re.compile(r"(?P<count>\d+)\s*[x\u00d7*]\s*(?P<name>.+)", re.IGNORECASE)  # such as 8xH100
OTHER_GPU = 'of another GPU give the data sheet in a cost file: "hardware": {"memory_bytes_s": ..., "flops": {...}}'
INVALID = "give memory_bytes_s and flops, or a name"
GGUF_BITS = {
    "q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0, "q8_0": 8.5,
    "q2_k_s": 2.9697, "q2_k": 3.1593, "q3_k_s": 3.6429, "q3_k_m": 4.0, "q3_k_l": 4.2979, "q4_k_s": 4.6672,
    "q4_k_m": 4.8944, "q5_k_s": 5.5704, "q5_k_m": 5.7036, "q6_k": 6.5633,
    "iq1_s": 2.0042, "iq1_m": 2.1460, "iq2_xxs": 2.3824, "iq2_xs": 2.5882, "iq2_s": 2.7403, "iq2_m": 2.9294,
    "iq3_xxs": 3.2548, "iq3_xs": 3.4977, "iq3_s": 3.6606, "iq3_m": 3.7628, "iq4_xs": 4.4597, "iq4_nl": 4.6818,
    "q2_k_xl": 3.13, "q3_k_xl": 3.93, "q4_k_xl": 5.23,
}  # fmt: skip
"""Bits per weight of llama.cpp's types, the head's included. Types that mix others: those of Llama-3.1-8B, as
tools/quantize/README.md of llama.cpp prints them; q3_k_m by its 3.74 GiB in quantize.cpp; unsloth's XL
by its files of Qwen3.8-27B, 10.7, 13.4 and 17.9 GB (qwen38-mtp, sweeps). Others: those of a block."""
BITS = {
    "float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "float8": 8.0, "int8": 8.0,
    "int4": 4.0 + 16 / 128, "int4-g32": 4.0 + 16 / 32, "mxfp4": 4.0 + 8 / 32, "nvfp4": 4.0 + 8 / 16,
    **GGUF_BITS,
}  # fmt: skip
"""Bits per weight, scales included: int4 has a 16-bit scale per 128 weights (int4-g32: per 32), MXFP4 an 8-bit scale
per 32, NVFP4 per 16. Scales per channel, or per block of 128 x 128 in float8, are not counted: less than 0.1 %."""
STATE_DTYPES = ("bfloat16", "float16", "float32")
PRODUCTS = {"float8": 8, "float4": 4}
"""Bits of narrow types of products."""


@dataclass(frozen=True)
class Hardware:
    """One device's ceilings.

    name : name in errors
    memory_bytes_s : memory bandwidth
    flops : FLOP/s of dense matrix products, by dtype
    memory_bytes : memory; 0: it does not limit
    link_bytes_s : bandwidth to other devices of its kind, in a direction; 0: there are none
    link_devices : devices that are joined so; between more of them, bytes take slower ways
    reread : for kernels that read the weights again for every token of a small pass, as Metal's do: time of each token
        after the first, relative to reading the weights once; for weights of 16 bits or more, and for packed weights
    title, source, date : full name, and source of the numbers

    Raises InputError for a ceiling that is not positive.

    >>> from specsim.cost.roofline.hardware import find_hardware
    >>> find_hardware("h100").memory_bytes_s
    3350000000000.0
    """

    name: str
    memory_bytes_s: float
    flops: Mapping[str, float]
    memory_bytes: float = 0.0
    link_bytes_s: float = 0.0
    link_devices: int = 8
    reread: tuple[float, float] = (0.0, 0.0)
    title: str = ""
    source: str = ""
    date: str = ""

    @classmethod
    def from_json(cls, keys: Mapping[str, Any]) -> Hardware:
        """Read ceilings that a person wrote down; InputError where they are malformed."""
        if "name" in keys:
            check_keys(keys, {field.name for field in fields(cls)} - {"name"}, "hardware")
        return from_keys({"name": keys.get("title") or "inline", **keys}, cls, "hardware", INVALID)

    def __post_init__(self) -> None:
        ceilings = {"memory_bytes_s": self.memory_bytes_s, **self.flops}
        for name, value in ceilings.items():
            if not 1.0 <= value <= LARGEST_CEILING:  # also catches NaN
                raise InputError(f"hardware {self.name}: {name}={value} is not a ceiling; give a positive number")
        for name in ("memory_bytes", "link_bytes_s"):
            if not 0 <= getattr(self, name) <= LARGEST_CEILING:
                raise InputError(f"hardware {self.name}: {name}={getattr(self, name)}; give at least 0")
        if not all(0 <= share <= 1 for share in self.reread):
            raise InputError(f"hardware {self.name}: reread={[*self.reread]}; give two shares of 0 to 1")

    @property
    def state_dtype(self) -> str:
        """The dtype in which engines keep hidden states on this device: the first of `STATE_DTYPES` that it has."""
        return next((name for name in STATE_DTYPES if name in self.flops), STATE_DTYPES[0])

    def flops_of(self, dtype: str) -> float:
        """FLOP/s in this dtype; InputError if the datasheet has none."""
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise InputError(f"hardware {self.name} has no throughput in {dtype}; choose one of {known}")
        return self.flops[dtype]


@dataclass(frozen=True)
class Derating:
    """The share of the ceilings that is reached, and the cost of a launch.

    memory, compute : reached shares of memory bandwidth and matrix throughput, above 0, at most 1
    launch_s : seconds to start an operation
    overlap : share of the shorter of reading and computing that hides behind the longer. 1 is the roofline; a processor
        that waits for memory before it computes has less
    all_reduce_s : seconds of an all-reduce without the transfer of its bytes

    Raises InputError for a number out of range.

    >>> from specsim.cost.roofline.hardware import Derating
    >>> Derating(memory=0.8, compute=0.7, launch_s=3e-6).overlap
    1.0
    """

    memory: float = 1.0
    compute: float = 1.0
    launch_s: float = 0.0
    overlap: float = 1.0
    all_reduce_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, low = getattr(self, field.name), 1e-6 if field.name in ("memory", "compute") else 0.0
            if not low <= value <= 1:
                raise InputError(f"derating: {field.name}={value}; give {'above' if low else 'at least'} 0, at most 1")


@cache
def usual_derating() -> Derating:
    """The derating of unmeasured hardware; the data file names its source."""
    usual = json.loads(DATASHEETS.read_text())["derating"]
    return Derating(**{field.name: usual[field.name] for field in fields(Derating)})


def on_links(derating: Derating, hardware: Hardware) -> Derating:
    """The derating of an engine on this hardware: at least `PCIE_ALL_REDUCE_S` per all-reduce if it has no faster link.

    >>> on_links(Derating(all_reduce_s=5e-6), find_hardware("rtx-pro-6000")).all_reduce_s
    2e-05
    """
    slow = 0 < hardware.link_bytes_s <= PCIE_BYTES_S
    return replace(derating, all_reduce_s=max(derating.all_reduce_s, PCIE_ALL_REDUCE_S)) if slow else derating


@cache
def known_hardware() -> dict[str, Hardware]:
    """Devices by name, each with its source.

    Examples
    --------
    >>> from specsim.cost.roofline.hardware import known_hardware
    >>> known_hardware()["a6000"].title
    'NVIDIA RTX A6000'
    """
    return {
        name: from_keys(entry | {"name": name}, Hardware, name, INVALID)
        for name, entry in json.loads(DATASHEETS.read_text())["hardware"].items()
    }


def find_hardware(hardware: str) -> Hardware:
    """Find a device by its name, also as nvidia-smi prints it.

    >>> find_hardware("NVIDIA GeForce RTX 4090").name
    'rtx-4090'
    """
    known, several = [*known_hardware()], SEVERAL.fullmatch(hardware.strip())
    if several and (name := find_name("GPU", several["name"], known)):
        count = several["count"]
        raise InputError(f"{hardware!r} is {count} GPUs; if all share every layer, give --gpu {name} --tp {count}")
    return known_hardware()[known_name("GPU", hardware, known, other=OTHER_GPU)]
