"""Load a causal language model, and refuse a checkpoint whose tensors are not exactly the model's.

transformers fills missing tensors with random numbers and drops unexpected ones. Published drafters have the class
names of models: an EAGLE head calls itself LlamaForCausalLM. Of a multimodal checkpoint (text with vision or audio)
only the text model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from realrun.lm.variants import without_head
from realrun.pairs.published import drafter_name
from specsim.io.errors import InputError

NAMED = 3  # most tensors that an error names per kind of fault
HEAD = "lm_head.weight"
# Names of the text model's tensors in a multimodal checkpoint, and in the text model itself.
TEXT_MODEL = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
}
MTP = re.compile(r"(^|\.)(mtp|mtp_layers|nextn)\.")  # tensors of MTP modules, which --drafter mtp reads
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
FAILURES = (
    OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, SafetensorError,
)  # fmt: skip


def load_whole(path: str, **options: Any) -> PreTrainedModel:
    """Load the model of a folder or hub id; the text model of a multimodal checkpoint. No remote code is run.

    options : of transformers' `from_pretrained`

    Raises InputError if it cannot be loaded, or a tensor is missing, unexpected or of another shape.
    """
    config = load_config(path)
    text = config.get_text_config()
    composite = text is not config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"{path} is a {config.model_type} model, whose text model transformers does not load by itself; give a "
            "causal language model"
        )
    names = {"key_mapping": TEXT_MODEL} if composite else {}
    try:
        model, report = load_with_report(path, config=text, **names, **options)
    except FAILURES as error:
        raise cannot_load(path, error) from None
    if composite and config.tie_word_embeddings and HEAD in report["missing_keys"]:  # only the outer config says so
        model.config.tie_word_embeddings = True
        model.tie_weights()
        report["missing_keys"] = {*report["missing_keys"]} - {HEAD}
    parts = [f"model.{name}." for name, _ in without_head(model).named_children()]
    check_whole(report, path, model, (*parts, HEAD) if composite else None)
    return model


def load_with_report(path: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Call transformers' `from_pretrained`; return the model and its report of missing, extra and misshapen tensors."""
    kind: Any = AutoModelForCausalLM
    loaded: tuple[Any, dict[str, Any]] = kind.from_pretrained(
        path, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    return loaded


def load_config(path: str) -> PretrainedConfig:
    """Load a model's configuration; InputError if there is none, or the folder holds a drafter instead of a model."""
    if drafter := drafter_name(Path(path)):
        raise InputError(f"{path} holds a drafter of kind {drafter}, not a model; pass it as --drafter")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except FAILURES as error:
        raise cannot_load(path, error) from None
    return config


def cannot_load(path: str, error: Exception) -> InputError:
    """Make the error for a model or tokenizer that transformers cannot load."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return InputError(f"cannot load {path}: {first_line} Give a local folder or a hub id.")


def check_whole(report: Mapping[str, Any], name: str, model: Any, parts: tuple[str, ...] | None = None) -> None:
    """Raise InputError that names the tensors if a checkpoint's are not exactly the model's.

    report : of `load_with_report`; name : of the model, for the message
    parts : in a multimodal checkpoint, prefixes of the text model's tensors; None if all tensors are the model's
    """
    mismatched = {tensor: shapes for tensor, *shapes in report["mismatched_keys"]}
    unexpected = [tensor for tensor in report["unexpected_keys"] if not _is_mtp(tensor, model)]
    if parts is not None:
        unexpected = [tensor for tensor in unexpected if tensor.startswith(parts)]
    faults = {
        "lacks": _listed({*report["missing_keys"]} - mismatched.keys()),
        "also has": _listed(unexpected),
        "has in another shape": _listed(
            f"{tensor} ({_size(here)} instead of {_size(wanted)})" for tensor, (here, wanted) in mismatched.items()
        ),
    }
    said = "; ".join(f"{fault} {tensors}" for fault, tensors in faults.items() if tensors)
    if said:
        kind = type(model).__name__
        raise InputError(f"{name} is not a whole {kind}: it {said}; download it again, or give another model")


def _is_mtp(tensor: str, model: Any) -> bool:
    """Check whether a tensor belongs to an MTP module, which some families number as layers after the model's own."""
    config = model.config.get_text_config()
    number = LAYER.search(tensor)
    behind = int(number[1]) - int(config.num_hidden_layers) if number else -1
    return 0 <= behind < (getattr(config, "num_nextn_predict_layers", None) or 0) or MTP.search(tensor) is not None


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = [f"{len(ordered) - NAMED} more"] if len(ordered) > NAMED else []
    return ", ".join(ordered[:NAMED] + more)


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that Hugging Face transformers and mlx-lm load.

    transformers 5 writes the base of the rotary embedding into `rope_parameters` alone. mlx-lm reads it at the top
    level of config.json, and without it silently decodes another model.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        file.write_text(json.dumps({**config, "rope_theta": rope["rope_theta"]}, indent=2, sort_keys=True) + "\n")
