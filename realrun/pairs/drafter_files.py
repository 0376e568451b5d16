"""Trained drafters on disk: one safetensors file, whose header says what it is and which target it belongs to.

Tensors and facts by kind:

- eesd: the state of `EarlyExit`; facts "layers" (N) and "exit_layers" (E)
- medusa: the state of `MedusaHeads`; fact "heads" (K). MEDUSA-2 has its backbone's low-rank updates
  beside them, `adapter.NAME.A` [r, in] and `adapter.NAME.B` [out, r] for the linear module NAME of
  the target, and the fact "adapter" {"rank", "alpha"}: W + alpha / r B A is the tuned weight
- edd: `edd.own_state` of the decoder; fact "states_after", the target's layers below the states that it reads
- vdm: the same of a decoder that reads none, an independent draft model
- eagle: the state of `Eagle`
- space: `mask` [d], the mask token's embedding, and either `adapter.NAME.A` and `.B` with their fact, as above, or
  `tuned.NAME` for every parameter of a target that was tuned whole; fact "masks" (k)
- self-sd: no tensors; facts "attention" and "mlp", numbers of the skipped sublayers
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from realrun.drafters.eagle import Eagle
from realrun.drafters.edd import check_split, load_own_state, one_layer_model
from realrun.drafters.eesd import EarlyExit, as_model
from realrun.drafters.medusa import MedusaHeads
from realrun.drafters.space import Masks, with_mask
from realrun.lm.skipped_layers import NOTHING, SkippedSublayers
from specsim.errors import InputError
from specsim.files import digest, replacing

FILE = "drafter.safetensors"
FORMAT = "specsim-drafter-1"
KINDS = ("eesd", "medusa", "edd", "vdm", "eagle", "self-sd", "space")
ADAPTER, TUNED = "adapter.", "tuned."

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DrafterFile:
    """What a file holds. facts["target"] describes the target that it was trained on."""

    path: Path
    kind: str
    tensors: Tensors
    facts: dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A drafter ready for its target; the fields of `realrun.pairs.pair.Pair`, whose target may be a tuned copy."""

    kind: str
    target: Any
    draft: Any
    split: int = 0
    skips: SkippedSublayers = NOTHING


def weights_digest(*parts: torch.nn.Module | str) -> str:
    """A short hash of a few numbers of every parameter of these modules, and of these strings; in bfloat16's precision.

    A parameter of three axes is a row of matrices, of which each counts.
    """

    def read(part: torch.nn.Module | str) -> Iterator[str | bytes]:
        if isinstance(part, str):
            yield part
            return
        for parameter in part.parameters():
            rows = parameter.detach().flatten(max(parameter.ndim - 2, 0))[..., :64]
            yield rows.bfloat16().double().cpu().numpy().tobytes()

    return digest(*(piece for part in parts for piece in read(part)))


def describe_target(target: Any, name: str) -> dict[str, Any]:
    """The fact "target" of a drafter trained on this model."""
    config = target.config
    return {
        "name": name,
        "digest": weights_digest(target),
        "architecture": type(target).__name__,
        "layers": int(config.num_hidden_layers),
        "hidden_size": int(config.hidden_size),
        "vocab_size": int(config.vocab_size),
    }


def save_drafter(folder: Path, kind: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Path:
    """Write FOLDER/drafter.safetensors, atomically; its path."""
    assert kind in KINDS and "target" in facts
    path = folder / FILE
    # safetensors refuses a file without tensors, and Self-SD has none.
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()} or {"none": torch.zeros(1)}
    with replacing(path) as temporary:
        save_file(whole, temporary, metadata={"format": FORMAT, "kind": kind, "facts": json.dumps(facts)})
    return path


def read_drafter(path: Path) -> DrafterFile:
    """Read what `save_drafter` wrote; a folder stands for the file in it. InputError says what is wrong."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"drafter {file} does not exist; train one with `realrun train`")
    again = "train it again with `realrun train`"
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("kind") not in KINDS:
                raise InputError(f"{file} is no drafter that this program reads ({FORMAT}); {again}")
            tensors = {name: handle.get_tensor(name) for name in handle.keys() if name != "none"}  # noqa: SIM118
        facts = json.loads(metadata["facts"])
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise InputError(f"drafter {file} is damaged ({error!r}); {again}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("target"), dict):
        raise InputError(f"drafter {file} does not say which target it belongs to; {again}")
    return DrafterFile(file, metadata["kind"], tensors, facts)


def load_drafter(path: Path, target: Any) -> Loaded:
    """The drafter in this file or folder, in the target's type and on its device.

    Raises InputError where it belongs to another target or does not fit it.
    """
    file = read_drafter(path)
    _check_target(file, target)
    facts = file.facts
    try:
        if file.kind == "self-sd":
            skips = SkippedSublayers(frozenset(facts["attention"]), frozenset(facts["mlp"]))
            return Loaded("self-sd", target, target, skips=skips)
        if file.kind == "eesd":
            early_exit = EarlyExit(target, facts["layers"], facts["exit_layers"])
            early_exit.load_state_dict(file.tensors)
            return Loaded("eesd", target, as_model(target, early_exit.eval()), split=early_exit.split)
        if file.kind in ("edd", "vdm"):
            decoder = one_layer_model(target)
            load_own_state(decoder, file.tensors)
            if file.kind == "vdm":
                return Loaded("model", target, decoder)
            check_split(target, facts["states_after"])
            return Loaded("edd", target, decoder, split=facts["states_after"])
        if file.kind == "eagle":
            eagle = Eagle(target)
            eagle.load_state_dict(file.tensors)
            return Loaded("eagle", target, eagle.eval(), split=int(target.config.num_hidden_layers))
        tuned = _tuned(target, file)
        if file.kind == "space":
            masked = with_mask(tuned, file.tensors["mask"])
            return Loaded("space", masked, Masks(masked, facts["masks"]).eval())
        heads = MedusaHeads(tuned, facts["heads"])
        heads.load_state_dict({k: v for k, v in file.tensors.items() if not k.startswith(ADAPTER)})
        return Loaded("medusa", tuned, heads.eval())
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(f"drafter {file.path} does not fit its target ({first_line}); train it again") from None


def _check_target(file: DrafterFile, target: Any) -> None:
    wanted, here = file.facts["target"], describe_target(target, "")
    name = wanted.get("name")
    for key, what in (
        ("architecture", "the architecture"),
        ("layers", "layers"),
        ("hidden_size", "the hidden size"),
        ("vocab_size", "the vocabulary size"),
        ("digest", "weights"),
    ):
        if wanted.get(key) != here[key]:
            raise InputError(
                f"drafter {file.path} was trained on {name} with {what} {wanted.get(key)}, this target has "
                f"{here[key]}; train one with `realrun train {file.kind}`"
            )


def _tuned(target: Any, file: DrafterFile) -> Any:
    """The target with the file's low-rank updates, or all of its parameters; the target itself where there are none."""
    whole = {name.removeprefix(TUNED): value for name, value in file.tensors.items() if name.startswith(TUNED)}
    if whole:
        tuned = copy.deepcopy(target)
        parameters = dict(tuned.named_parameters())
        if parameters.keys() != whole.keys():
            raise KeyError("parameters of other names")
        with torch.no_grad():
            for name, value in whole.items():
                parameters[name].copy_(value)
        return tuned
    names = {name.removeprefix(ADAPTER).removesuffix(".A") for name in file.tensors if name.endswith(".A")}
    if not names:
        return target
    scale = file.facts["adapter"]["alpha"] / file.facts["adapter"]["rank"]
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        for name in sorted(names):
            weight = tuned.get_submodule(name).weight
            low, high = (file.tensors[f"{ADAPTER}{name}.{part}"].to(weight.device, torch.float64) for part in "AB")
            weight.copy_((weight.double() + scale * high @ low).to(weight.dtype))
    return tuned
