"""Trained drafters on disk: a safetensors file whose header names the kind of drafter and its target.

Its tensors and its other facts are the kind's own (`realrun.drafters`). Some drafters have names: the lab's, with the
command that trains each, and those that the package ships for other targets.

EAGLE-3 checkpoints are written as vLLM and SGLang load them: config.json and a file of weights, with the names of the
authors' code (github.com/SafeAILab/EAGLE), which both engines read. Embeddings are the target's. config.json names the
layers whose states are read twice: vLLM counts layers, and SGLang numbers them from 0. EAGLE drafters are written as
vLLM loads them. `realrun.pairs.published` reads the drafters that others publish.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, NotRequired, TypedDict

import torch
from safetensors import SafetensorError, safe_open

from realrun.drafters.block import BlockKind
from realrun.drafters.eagle import Eagle
from realrun.drafters.eagle3 import ARCHITECTURE, LAYERS_KEY, Eagle3, vocabulary_tables
from realrun.drafters.kind import DrafterKind
from realrun.drafters.registry import DRAFTERS
from realrun.pairs.gguf_models import PACKAGES
from realrun.pairs.published import CONFIG, WEIGHTS, is_published, read_published
from realrun.tensor_files import FAILURES, check_names, save_tensors
from specsim.io.errors import InputError
from specsim.io.files import digest, replacing_folder, write_json
from specsim.io.json import parse_json

FILE = "drafter.safetensors"
FORMAT = "specsim-drafter-1"

Tensors = dict[str, torch.Tensor]
SHIPPED = Path(__file__).parents[1] / "weights"  # what the package ships, by the names of target and drafter
LAB_WEIGHTS = SHIPPED / "lab"
TRAINED_HERE = Path("lab-weights")  # in the working folder, where the commands of RECIPES write
LAB_PREFIX = "lab:"  # before the name of a drafter of the lab's

# Of `realrun train`, without --out. None for weights that the package ships.
RECIPES: dict[str, str | None] = {
    "eesd": "eesd --layers 2 --tokens 4 --dtype bfloat16",
    "medusa-1": "medusa --heads 4 --lr 0.005 --tokens 5 --dtype bfloat16",
    "medusa-2": "medusa --joint --heads 4 --heads-from lab-weights/medusa-1 --lambda-0 0.1 --backbone-lr 0.0005 "
    "--dtype bfloat16",
    "self-sd": None,
    "edd": "edd --tokens 5 --dtype bfloat16",
    "eagle": None,
    "space": "space --lr 0.003 --batch 4 --window 128 --tokens 2 --dtype bfloat16",
}
LAB_DRAFTERS = tuple(RECIPES)
EAGLE = "EagleLlamaForCausalLM"  # the architecture of an EAGLE drafter


class Target(TypedDict):
    """The fact "target": the model that the drafter was trained on."""

    name: str
    digest: str
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int


class Facts(TypedDict):
    """The facts that are read: those of all kinds, and the sizes of some."""

    target: Target
    layers: NotRequired[int]
    exit_layers: NotRequired[int]
    heads: NotRequired[int]
    states_after: NotRequired[int]
    masks: NotRequired[int]
    attention: NotRequired[list[int]]
    mlp: NotRequired[list[int]]
    config: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class DrafterFile:
    """Contents of a drafter file; facts["target"] describes the target that it was trained on, if the file does."""

    path: Path
    kind: str
    tensors: Tensors
    facts: dict[str, Any]


def weights_digest(*parts: torch.nn.Module | str) -> str:
    """Compute a digest of these strings and of a few numbers of every parameter, rounded to bfloat16.

    A parameter with three axes contributes numbers of each of its matrices.
    """

    def read(part: torch.nn.Module | str) -> Iterator[str | bytes]:
        if isinstance(part, str):
            yield part
            return
        for parameter in part.parameters():
            rows = parameter.detach().flatten(max(parameter.ndim - 2, 0))[..., :64]
            yield rows.bfloat16().double().cpu().numpy().tobytes()

    return digest(*(piece for part in parts for piece in read(part)))


def describe_target(target: Any, name: str) -> dict[str, str | int]:
    """Make the fact "target" of a drafter trained on this model."""
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
    """Write FOLDER/drafter.safetensors, atomically; return its path."""
    assert DRAFTERS[kind].origin == "file" and "target" in facts
    path = folder / FILE
    # safetensors refuses a file without tensors, and Self-SD has none.
    whole = tensors or {"none": torch.zeros(1)}
    save_tensors(path, whole, {"format": FORMAT, "kind": kind, "facts": json.dumps(facts)})
    return path


def read_drafter(path: Path) -> DrafterFile:
    """Read what `save_drafter` wrote, from a file or its folder, or the folder of a published drafter.

    Raises InputError if it is missing or damaged.
    """
    file = path / FILE if path.is_dir() else path
    if _is_published(path):
        kind, tensors, facts = read_published(path)
        return DrafterFile(path, kind, tensors, facts)
    if path.suffix == ".gguf":
        raise InputError(f"drafter {path} is a GGUF file, which is not read; give the checkpoint that it was made from")
    if not file.is_file():
        raise InputError(f"drafter {file} does not exist; train a drafter with `realrun train`")
    again = "train it again with `realrun train`"
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            stated = DRAFTERS.get(metadata.get("kind", ""))
            if metadata.get("format") != FORMAT or stated is None or stated.origin != "file":
                raise InputError(f"{file} is not a drafter in the format {FORMAT}; {again}")
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        check_names(file, metadata, tensors, again)
        tensors.pop("none", None)
        text = metadata["facts"]
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"drafter {file} is damaged ({error!r}); {again}") from None
    facts = parse_json(text, f"what drafter {file} says of itself", Facts, invalid=again)
    return DrafterFile(file, metadata["kind"], tensors, facts)


def _is_published(path: Path) -> bool:
    return not (path / FILE).is_file() and is_published(path)


RESULTS = (  # facts that did not influence the training
    "target", "held_out", "parameters", "tokens", "seconds", "tokens_per_second", "peak_memory_bytes", "provenance",
    "k", "first_token_accepted_share", "predicted_speedup", "prediction", "costs", "warnings",
)  # fmt: skip


def training_recipe(path: Path) -> dict[str, Any]:
    """Read from a drafter's file, which `load_drafter` reads as well, all that determined its training.

    "not_recorded" lists facts that older files lack, and published drafters.
    """
    if _is_published(path):
        return {"not_recorded": list(DrafterKind.recipe)}
    with safe_open(path / FILE if path.is_dir() else path, framework="pt") as handle:
        metadata = handle.metadata()
    facts = json.loads(metadata["facts"])
    recipe = {key: value for key, value in facts.items() if key not in RESULTS}
    if "loop" in recipe:
        recipe["loop"] = {key: value for key, value in recipe["loop"].items() if key != "checkpoint_s"}
    return {**recipe, "not_recorded": [key for key in DRAFTERS[metadata["kind"]].recipe if key not in facts]}


def split_block(name: str) -> tuple[str, int | None]:
    """Split FOLDER:K into a block drafter's folder and its tokens per block; K is None if no such folder exists."""
    folder, _, tokens = name.rpartition(":")
    return (folder, int(tokens)) if tokens.isdecimal() and Path(folder).is_dir() else (name, None)


def load_drafter(path: Path, target: Any, block: int | None = None) -> tuple[Any, DrafterKind]:
    """Load the drafter in this file or folder, and its target, in the target's type and on its device.

    block : tokens per block, for block drafters only; by default as many as in training

    The target is `target`, or a copy with tuned weights if the file holds them.
    Raises InputError if the drafter belongs to another target or does not fit it.
    """
    file = read_drafter(path)
    _check_target(file, target)
    DRAFTERS[file.kind].check_target(target)
    try:
        tuned, drafter = DRAFTERS[file.kind].load(target, file.tensors, file.facts)
    except FAILURES as error:
        if isinstance(error, InputError):
            raise
        reason = shorten(str(error), 300, placeholder=" ...")  # torch names the tensors from the second line on
        advice = "train it again" if "target" in file.facts else "give the target that it was trained for"
        raise InputError(f"drafter {file.path} does not fit its target ({reason}); {advice}") from None
    if block is None:
        return tuned, drafter
    if not isinstance(drafter, BlockKind):
        raise InputError(f"{path} is of kind {file.kind}, which drafts no blocks; leave :{block} out")
    return tuned, drafter.of(block)


def _check_target(file: DrafterFile, target: Any) -> None:
    if "target" not in file.facts:  # published drafters do not identify it
        return
    trained_on, here = file.facts["target"], describe_target(target, "")
    name = trained_on.get("name")
    for key, what in (
        ("architecture", "the architecture"),
        ("layers", "layers"),
        ("hidden_size", "the hidden size"),
        ("vocab_size", "the vocabulary size"),
        ("digest", "weights"),
    ):
        if trained_on.get(key) != here[key]:
            raise InputError(
                f"drafter {file.path} was trained on {name} with {what} {trained_on.get(key)}, this target has "
                f"{here[key]}; train a drafter with `realrun train {file.kind}`"
            )


def has_lab_drafter(name: str) -> bool:
    """Check whether the weights of this drafter are shipped or were trained in the working folder."""
    return any((folder / name / FILE).is_file() for folder in (LAB_WEIGHTS, TRAINED_HERE))


def shipped_drafter(target: str, name: str) -> Path | None:
    """Find the folder of a drafter that the package ships for this target, if the target is not the lab's."""
    folder = SHIPPED / target / name
    is_name = Path(name).name == name  # and no path, which may lead anywhere
    return folder if is_name and target in PACKAGES and (folder / FILE).is_file() else None


def lab_drafter(name: str) -> Path:
    """Find the folder of a lab drafter; InputError with the training command if its weights are missing."""
    for folder in (LAB_WEIGHTS, TRAINED_HERE):
        if (folder / name / FILE).is_file():
            return folder / name
    command = f"realrun train {RECIPES[name]} --out {TRAINED_HERE / name}"
    raise InputError(f"the lab's drafter {name} is not trained yet; run: {command}")


def is_checkpoint(folder: Path, architecture: str = ARCHITECTURE) -> bool:
    """Check whether a folder's config.json is that of a checkpoint of this architecture, by default EAGLE-3's."""
    config = folder / CONFIG
    return config.is_file() and f'"{architecture}"' in config.read_text()


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
    if not eagle.for_vllm or eagle.fuse.bias is not None or eagle.vocabulary is not None:
        raise InputError(
            "vLLM's EAGLE drafter has no bias and no first norm, and drafts all tokens, unlike this one; train one by "
            "`realrun train eagle --for-vllm`"
        )
    tensors = {name.replace("fuse.", "fc."): tensor for name, tensor in eagle.state_dict().items()}
    with replacing_folder(folder) as new:
        save_tensors(new / WEIGHTS, tensors, {"format": "pt"})
        write_json({**target.config.to_dict(), "architectures": [EAGLE], "num_hidden_layers": 1}, new / CONFIG)
