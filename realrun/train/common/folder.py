"""The folder of a training: its plan, and a checkpoint from which a killed run continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from realrun import tensor_files
from realrun.kept_files import read_own, refuse_file, refuse_other
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.json import parse_json

PLAN, CHECKPOINT, LOG = "plan.json", "checkpoint.safetensors", "log.jsonl"
ANEW = "delete the folder to train anew, or give another --out"

Tensors = dict[str, torch.Tensor]


def claim(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan to the folder; InputError if the folder holds another plan."""
    refuse_another(folder, plan, whole=True)
    if not (folder / PLAN).exists():
        write_json(dict(plan), folder / PLAN)


def refuse_another(folder: Path, plan: Mapping[str, Any], *, whole: bool = False) -> None:
    """Raise InputError if the folder holds another plan; with whole=False, `plan` may be a part of it."""
    refuse_file(folder)
    path = folder / PLAN
    if not path.exists():
        return
    there, wanted = read_own(path, again=ANEW), json.loads(json.dumps(plan))  # tuples become lists, as in the file
    for target in (there.get("target"), wanted.get("target")):
        if isinstance(target, dict):
            target.pop("name", None)  # the path that it was loaded from; its weights identify it
    others = {key: None for key in there if whole and key not in wanted}
    refuse_other(f"{folder} holds a training", there, wanted | others, "give another --out")


def save_checkpoint(
    path: Path, parts: Mapping[str, Tensors], optimizer: torch.optim.Optimizer | None, **facts: Any
) -> None:
    """Write everything that a run needs to continue: named sets of tensors, the optimizer's state, and facts."""
    tensors = {f"{part}.{name}": value for part, whole in parts.items() for name, value in whole.items()}
    for index, slots in optimizer.state_dict()["state"].items() if optimizer else ():
        for slot, value in slots.items():
            tensors[f"optimizer.{index}.{slot}"] = torch.as_tensor(value)
    tensor_files.save_tensors(path, tensors, {name: json.dumps(value) for name, value in facts.items()})


@contextmanager
def checkpoint(
    path: Path, optimizer: torch.optim.Optimizer, device: str | torch.device = "cpu"
) -> Iterator[tuple[dict[str, Tensors], dict[str, Any]]]:
    """Read the sets of tensors and the facts that `save_checkpoint` wrote, and restore the optimizer's state.

    An error on reading them, in the block too, becomes an InputError that calls the file damaged.
    """
    try:
        parts: dict[str, Tensors] = {}
        state: dict[int, Tensors] = {}
        tensors = load_file(path, device=str(device))
        with safe_open(path, framework="pt") as handle:
            tensor_files.check_names(path, handle.metadata() or {}, tensors, "delete it to train anew")
        for key, value in tensors.items():
            part, name = key.split(".", 1)
            if part == "optimizer":
                index, slot = name.split(".")
                state.setdefault(int(index), {})[slot] = value.clone()
            else:
                parts.setdefault(part, {})[name] = value
        yield parts, read_facts(path)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        reason = shorten(str(error), 300, placeholder=" ...")
        raise InputError(f"checkpoint {path} is damaged ({reason}); delete it to train anew") from None


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts in a checkpoint's header."""
    with safe_open(path, framework="pt") as handle:
        facts = handle.metadata() or {}
    place, advice = f"what checkpoint {path} says of itself", "delete it to train anew"
    facts.pop(tensor_files.NAMES, None)
    return {name: parse_json(value, place, invalid=advice) for name, value in facts.items()}
