"""Read published drafters: a folder with config.json and weights, in the layouts of several libraries.

    EAGLE-1, -2   SafeAILab, vLLM, and speculators up to release 0.3
    EAGLE-3, 3.1  SafeAILab, SpecForge, AngelSlim and speculators, which nests the sizes of the layers
    P-EAGLE       speculators and SpecForge
    DFlash        z-lab, SpecForge and speculators; also DSpark, without its confidence head
    MEDUSA        FasterDecoding's `medusa_lm_head.pt` or `.safetensors`, and vLLM

A layout is recognised by config.json and by the names of the tensors; other drafters are refused by name. Published
files name their target at most by a hub id, so whether a drafter belongs to the given target is not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, NamedTuple, TypedDict

import torch
from msgspec import Meta
from safetensors import safe_open
from safetensors.torch import load_file

from realrun.drafters.block import DFLASH, P_EAGLE, W1
from realrun.drafters.eagle3 import ARCHITECTURE, LAYERS_KEY
from realrun.tensor_files import FAILURES
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.drafters import LAYERS, drafter_config
from specsim.io.errors import InputError
from specsim.io.json import checked, read_json

CONFIG, WEIGHTS, PICKLED, INDEX = "config.json", "model.safetensors", "pytorch_model.bin", ".index.json"
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
FILES = (WEIGHTS, PICKLED, *MEDUSA_FILES)
AGAIN = "download it again"
READ = "EAGLE-1 to EAGLE-3.1, P-EAGLE, DFlash, DSpark and MEDUSA"
# Drafters that are not read, and why.
OTHERS = {
    "dflash2": "DFlash2, whose layers convolve and whose head selects candidates",
    "domino": "Domino, whose head reads the tokens before each drafted token",
    "xpress": "XPress",
    "mtp": "an MTP module, which is a part of its target",
}
TRAINED_DEPTHS = 8  # tokens per block of P-EAGLE, by default in speculators and SpecForge
VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")  # copies of the target's parts

Tensors = dict[str, torch.Tensor]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Counts = list[Count] | None


class Proposal(TypedDict, total=False):
    """A proposal method of speculators."""

    speculative_tokens: Count | None


class Speculators(TypedDict, total=False):
    """What speculators says of decoding."""

    proposal_methods: list[Proposal] | None


class Own(TypedDict, total=False):
    """The keys of `dflash_config` and `eagle_config`."""

    target_layer_ids: Counts
    eagle_aux_hidden_state_layer_ids: Counts
    mask_token_id: Count | None
    sample_from_anchor: bool | None


class Stated(TypedDict, total=False):
    """The keys of config.json that are read here; `Sizes` has those of its layers."""

    architectures: list[str] | None
    speculators_config: Speculators | None
    eagle_config: Own | None
    dflash_config: Own | None
    block_size: Annotated[int, Meta(ge=1, le=256)]
    layer_types: list[str] | None
    target_layer_ids: Counts
    aux_hidden_state_layer_ids: Counts
    eagle_aux_hidden_state_layer_ids: Counts
    mask_token_id: Count | None
    pard_token: Count | None
    ptd_token_id: Count | None


FEW = 8  # layers, which are made in any case, so that missing tensors are named
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


class Index(TypedDict):
    """The index of weights in several files: the file of each tensor."""

    weight_map: dict[str, str]


class Published(NamedTuple):
    """A published drafter: the name of its kind in `realrun.drafters.registry`, and what its `load` takes."""

    kind: str
    tensors: Tensors
    facts: dict[str, Any]


def is_published(folder: Path) -> bool:
    """Check whether this is the folder of a published drafter, of a supported layout or not."""
    return folder.is_dir() and drafter_name(folder) is not None


def drafter_name(folder: Path) -> str | None:
    """Name the drafter in a folder, such as "eagle", "eagle3", "p-eagle", "dflash", "medusa"; None for other models.

    Raises InputError if its config.json is damaged.
    """
    if any((folder / name).is_file() for name in MEDUSA_FILES):
        return "medusa"
    if not (folder / CONFIG).is_file():
        return None
    config = _read_config(folder)
    written = json.dumps([config.get(key) for key in ("architectures", "speculators_model_type")]).lower()
    other = next((name for name in OTHERS if name in written), None)
    stated = drafter_config(config)
    if other is not None or stated is not None:
        return other or (stated.method if stated is not None else None)
    # EAGLE-1 drafters call themselves LlamaForCausalLM, but have a projection `fc` and names without "model.".
    names = _names(folder)
    return "eagle" if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names else None


def read_published(folder: Path) -> Published:
    """Read a published drafter.

    Raises InputError if it is damaged, or of a kind or structure that is not supported.
    """
    name = drafter_name(folder)
    if name in OTHERS:
        raise InputError(f"drafter {folder} is {OTHERS[name]}, which is not read; published drafters are {READ}")
    readers = {
        "eagle": _read_eagle,
        "eagle3": _read_eagle3,
        "p-eagle": _read_block,
        "dflash": _read_block,
        "dspark": _read_block,
        "medusa": _read_medusa,
    }
    if name not in readers:
        raise InputError(f"drafter {folder} is of kind {name}, which is not read; published drafters are {READ}")
    config = _read_config(folder) if (folder / CONFIG).is_file() else ModelConfig({})
    tensors = {key: tensor for key, tensor in _tensors(folder).items() if key not in VERIFIER}
    checked(dict(config), str(folder / CONFIG), Stated, invalid=AGAIN)
    try:
        published = readers[name](folder, tensors, config)
    except KeyError as error:
        raise InputError(f"drafter {folder} has no {error.args[0]}, which {name} drafters have; {AGAIN}") from None
    if "config" in published.facts:  # by which layers are made
        _check_sizes(folder, config, tensors)
    return published


def _read_config(folder: Path) -> ModelConfig:
    name = str(folder / CONFIG)
    return ModelConfig(read_json(folder / CONFIG, name, dict[str, Any], missing=AGAIN, invalid=AGAIN))


def _check_sizes(folder: Path, config: ModelConfig, tensors: Tensors) -> None:
    """Raise InputError unless the sizes in a config.json are at most those of the tensors, before layers are made."""
    largest = max((max(tensor.shape, default=1) for tensor in tensors.values()), default=1)
    stated = _flat(config)
    heads = stated.get("num_attention_heads")
    each = max(1, largest // heads) if type(heads) is int and heads > 0 else largest
    most = {**dict.fromkeys(SIZES, largest), "num_hidden_layers": max(FEW, len(tensors)), "head_dim": each}
    for name, limit in most.items():
        value = stated.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= limit):
            raise InputError(f"{folder / CONFIG} has {name} {short(value)}, its tensors allow 1 to {limit}; {AGAIN}")


def _files(folder: Path) -> list[Path]:
    for name in FILES:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}{INDEX}").is_file():
            named: Index = read_json(index, str(index), Index, missing=AGAIN, invalid=AGAIN)
            return [folder / file for file in sorted({*named["weight_map"].values()})]
    raise InputError(f"drafter {folder} has no weights that are read (none of {', '.join(FILES)}); {AGAIN}")


def _read(folder: Path, file: Path, *, names_only: bool = False) -> Mapping[str, torch.Tensor]:
    try:
        if names_only and file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                return dict.fromkeys(handle.keys(), torch.empty(0))
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors: Tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=names_only)
        if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()):
            raise ValueError(f"{file.name} does not hold tensors by name")
    except FAILURES as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"drafter {folder} has no weights that are read ({reason}); {AGAIN}") from None
    return tensors


def _tensors(folder: Path) -> Tensors:
    return {name: tensor for file in _files(folder) for name, tensor in _read(folder, file).items()}


def _names(folder: Path) -> set[str]:
    try:
        return {name for file in _files(folder) for name in _read(folder, file, names_only=True)}
    except InputError:
        return set()


def _flat(config: ModelConfig) -> dict[str, Any]:
    nested = config.get(LAYERS)
    flat = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
    return {key: value for key, value in flat.items() if key not in (LAYERS, "auto_map") and "speculators" not in key}


def _read_eagle(folder: Path, tensors: Tensors, config: ModelConfig) -> Published:
    """Read EAGLE-1 and -2: the layer that vLLM runs, with or without a bias, and the target's embedding and head."""
    layernorms = [name for name in tensors if name.endswith(("embedding_layernorm.weight", "lm_head_layernorm.weight"))]
    if layernorms:
        raise InputError(f"drafter {folder} is an EAGLE with the norms of HASS ({layernorms[0]}), which is not read")
    renamed = {
        re.sub(r"^(fusion_)?fc\.", "fuse.", name).replace("transformer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(("embed_tokens.", "lm_head."))
    }
    return Published("eagle", renamed, {})


def _read_eagle3(folder: Path, tensors: Tensors, config: ModelConfig) -> Published:
    stated = {**_flat(config), "architectures": [ARCHITECTURE]}
    if LAYERS in config:  # vLLM's default for files of speculators
        stated.setdefault("norm_before_residual", True)
    renamed = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    return Published("eagle3", renamed, {"config": stated})


def _read_block(folder: Path, tensors: Tensors, config: ModelConfig) -> Published:
    stated, own = _flat(config), config.get("dflash_config") or {}
    tensors = {name.removeprefix("logit_head."): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
    form = P_EAGLE if "mask_hidden" in tensors else DFLASH
    masks = [
        places.get(key)
        for places in (config, own)
        for key in ("mask_token_id", "pard_token", "ptd_token_id")
        if places.get(key) is not None
    ]
    if not masks:
        raise InputError(f"drafter {folder} does not say which token masks are; write its mask_token_id in config.json")
    facts: dict[str, Any] = {"form": form, "mask": masks[0]}
    if form == P_EAGLE:
        proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        facts["tokens"] = proposals[0].get("speculative_tokens") or TRAINED_DEPTHS
        nested = (config.get("eagle_config") or {}).get(LAYERS_KEY)
        states = config.get(LAYERS_KEY) or (nested and [number + 1 for number in nested])
    else:
        windows = {*(stated.get("layer_types") or ())} - {"full_attention"}
        if windows or own.get("use_swa") or own.get("attention_sink_bias") or own.get("attention_value_scale"):
            raise InputError(f"drafter {folder} is a DFlash with windows, sinks or scaled values, which is not read")
        anchor = config.get("sample_from_anchor", own.get("sample_from_anchor"))
        if anchor is None:  # vLLM's default is true for the authors' DSpark; SpecForge's, with dflash_config, is false
            anchor = W1 in tensors and not own
        facts |= {"draws_anchor": anchor, "tokens": int(config["block_size"]) - (not anchor)}
        facts["causal"] = bool(own.get("causal"))
        facts["markov_rank"] = tensors[W1].shape[1] if W1 in tensors else 0
        if any("joint_proj" in name for name in tensors):
            raise InputError(f"drafter {folder} is a DSpark with a recurrent head, which is not read; {READ} are")
        stated["model_type"] = "qwen3"
        numbers = own.get("target_layer_ids") or config.get("target_layer_ids")  # layers whose output is read, from 0
        states = config.get("aux_hidden_state_layer_ids") or (numbers and [number + 1 for number in numbers])
    if not states:
        raise InputError(f"drafter {folder} does not say which layers of its target it reads; add them to config.json")
    facts["states_after"] = states
    return Published("block", tensors, {"config": {**stated, **facts}})


def _read_medusa(folder: Path, tensors: Tensors, config: ModelConfig) -> Published:
    """Read MEDUSA's heads: for each, a residual block of one layer, mostly with a bias, and a head."""
    blocks: dict[tuple[str, int], torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        plain = re.sub(r"^(\d+)\.(\d+)\.linear\.(\w+)$", r"blocks.\1.layers.\2.\3", plain)
        plain = re.sub(r"^(\d+)\.(\d+)\.weight$", r"lm_heads.\1.weight", plain)
        found = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.(weight)", plain)
        if found is None:
            raise InputError(f"drafter {folder} has MEDUSA heads with {name}, which are not read; {READ} are")
        if found[2] not in (None, "0"):
            raise InputError(f"drafter {folder} has MEDUSA heads of several layers ({name}), and only one is read")
        part, head = (found[3], found[1]) if found[1] else ("head", found[4])
        blocks[part, int(head)] = tensor
    heads = sum(part == "weight" for part, _ in blocks)
    stacked = {
        "residual": torch.stack([blocks["weight", head] for head in range(heads)]),
        "vocabulary": torch.stack([blocks["head", head] for head in range(heads)]),
    }
    if ("bias", 0) in blocks:
        stacked["bias"] = torch.stack([blocks["bias", head] for head in range(heads)])
    return Published("medusa", stacked, {"heads": heads})
