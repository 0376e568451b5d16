"""EAGLE-3 checkpoints as they are published and as vLLM and SGLang load them: config.json and a file of weights.

Names of weights and keys of config.json are those of the authors' code (github.com/SafeAILab/EAGLE), which both engines
read. Embeddings are the target's. config.json names the layers whose states are read twice: vLLM counts layers, and
SGLang numbers them from 0. EAGLE drafters are written as vLLM loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from realrun.drafters.eagle import Eagle
from realrun.drafters.eagle3 import ARCHITECTURE, LAYERS_KEY, Eagle3, vocabulary_tables
from realrun.tensor_files import save_tensors
from specsim.io.errors import InputError
from specsim.io.files import replacing_folder, write_json
from specsim.io.json import parse_json

EAGLE = "EagleLlamaForCausalLM"  # the architecture of an EAGLE drafter
CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"


def is_checkpoint(folder: Path, architecture: str = ARCHITECTURE) -> bool:
    """Check whether a folder's config.json is that of a checkpoint of this architecture, by default EAGLE-3's."""
    config = folder / CONFIG
    return config.is_file() and f'"{architecture}"' in config.read_text()


def read_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the tensors of a checkpoint and its config.json; InputError if they are missing or damaged."""
    again = "download it again"
    config: dict[str, Any] = parse_json((folder / CONFIG).read_text(), str(folder / CONFIG), invalid=again)
    try:
        if (folder / WEIGHTS).is_file():
            tensors = load_file(folder / WEIGHTS)
        else:
            tensors = torch.load(folder / PICKLED, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"EAGLE-3 checkpoint {folder} has no weights that are read ({reason}); {again}") from None
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}, config


def write_checkpoint(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint that vLLM and SGLang load, atomically; the folder is replaced."""
    head, layers = tensors["lm_head.weight"], config[LAYERS_KEY]
    nested = {LAYERS_KEY: [number - 1 for number in layers], "use_aux_hidden_state": True}
    sizes = {"draft_vocab_size": len(head), "torch_dtype": str(head.dtype).removeprefix("torch.")}
    with replacing_folder(folder) as new:
        save_tensors(new / WEIGHTS, tensors, {"format": "pt"})
        write_json({**config, **sizes, "eagle_config": nested}, new / CONFIG)


def write_drafter(eagle: Eagle3, vocabulary: int, folder: Path) -> None:
    """Write a loaded drafter of a target with this vocabulary as such a checkpoint."""
    tables = {} if eagle.tokens is None else vocabulary_tables(eagle.tokens, vocabulary)
    config = {**eagle.config_json, LAYERS_KEY: list(eagle.states_after), "vocab_size": vocabulary}
    write_checkpoint({**eagle.state_dict(), **tables}, config, folder)


def write_eagle(eagle: Eagle, target: Any, folder: Path) -> None:
    """Write a loaded EAGLE drafter of this target as vLLM loads it; InputError if vLLM does not run such a layer."""
    if (kind := target.config.model_type) != "llama":
        raise InputError(f"vLLM loads EAGLE drafters of Llama targets, and this target is {kind}; give another target")
    if not eagle.for_vllm or eagle.vocabulary is not None:
        raise InputError(
            "vLLM's EAGLE drafter has no bias and no first norm, and drafts all tokens, unlike this one; train one by "
            "`realrun train eagle --for-vllm`"
        )
    tensors = {name.replace("fuse.", "fc."): tensor for name, tensor in eagle.state_dict().items()}
    with replacing_folder(folder) as new:
        save_tensors(new / WEIGHTS, tensors, {"format": "pt"})
        write_json({**target.config.to_dict(), "architectures": [EAGLE], "num_hidden_layers": 1}, new / CONFIG)
