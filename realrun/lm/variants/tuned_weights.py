"""Weights of a target that was tuned together with its drafter, as in the drafter's file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

ADAPTER = "adapter."  # before NAME.A [r, in] and NAME.B [out, r], the low-rank update of the linear module NAME
TUNED = "tuned."  # before the name of every parameter of a target that was tuned whole


def tuned_target(target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Any:
    """Copy the target with these low-rank updates or parameters; return the target itself if there are none.

    facts["adapter"] : {"rank", "alpha"}; W + alpha / rank B A is the tuned weight
    """
    whole = {name.removeprefix(TUNED): value for name, value in tensors.items() if name.startswith(TUNED)}
    if whole:
        tuned = copy.deepcopy(target)
        parameters = dict(tuned.named_parameters())
        if parameters.keys() != whole.keys():
            raise KeyError("parameters of other names")
        with torch.no_grad():
            for name, value in whole.items():
                parameters[name].copy_(value)
        return tuned
    names = {name.removeprefix(ADAPTER).removesuffix(".A") for name in tensors if name.endswith(".A")}
    if not names:
        return target
    scale = facts["adapter"]["alpha"] / facts["adapter"]["rank"]
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        for name in sorted(names):
            weight = tuned.get_submodule(name).weight
            low, high = (tensors[f"{ADAPTER}{name}.{part}"].to(weight.device, torch.float64) for part in "AB")
            weight.copy_((weight.double() + scale * high @ low).to(weight.dtype))
    return tuned
