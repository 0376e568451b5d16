"""Find a model's shape and the format of its weights by the model's name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from specsim.cost.roofline.config import INVALID, ModelConfig
from specsim.cost.roofline.drafters import drafter_config
from specsim.cost.roofline.families import architecture_from_config
from specsim.cost.roofline.shape import Architecture
from specsim.io.errors import InputError
from specsim.io.json import read_json
from specsim.io.names import find_name, known_name

SHAPES = Path(__file__).parent / "shapes.json"


class Published(NamedTuple):
    """What `shapes.json` says of public models and their heads, by the model's name.

    models : the config.json, without keys that do not change the shape
    released : the formats of the weights of models that were released in fewer than 16 bits
    heads : by kind, the config.json of published draft heads whose sizes differ from the target's
    """

    models: dict[str, ModelConfig]
    released: dict[str, str | dict[str, str]]
    heads: dict[Literal["eagle3", "mtp"], dict[str, ModelConfig]]


@cache
def published() -> Published:
    """Read `shapes.json`."""
    document = json.loads(SHAPES.read_text())
    models, eagle3, mtp = (
        {name: ModelConfig(config, name) for name, config in document[key].items()}
        for key in ("models", "eagle3", "mtp")
    )
    models |= {name: ModelConfig(models[other], name) for name, other in document["same_shape"].items()}
    return Published(models, document["released"], {"eagle3": eagle3, "mtp": mtp})


def public_shapes() -> dict[str, ModelConfig]:
    """The published config.json of public models by name, without keys that do not change the shape."""
    return published().models


@cache
def published_head(kind: Literal["eagle3", "mtp"], target: Architecture) -> ModelConfig:
    """The config.json of the published head for this target, found by name, else by shape; empty if there is none."""
    heads = published().heads[kind]
    same_shape = (name for name in heads if replace(find_architecture(name), name=target.name) == target)
    return heads.get(target.name) or heads.get(next(same_shape, ""), ModelConfig({}))


class NamedModel(NamedTuple):
    """What a model's name says.

    shape : a name of `public_shapes`
    weights : the format of its weights, as it is written at the end of the name; else empty
    """

    shape: str
    weights: str = ""


OTHER_MODEL = "give one of the same shape, or the model's config.json"
OWNERS = ("meta", "qwen", "openai", "google", "nvidia", "mistralai")  # as copies' names begin: Qwen_Qwen3-8B
ENDINGS = re.compile(
    "instruct|chat|base|it|hf|pt|rl|sft|thinking|preview|exp|terminus|gguf|mlx|dynamic|block|kv|ud|unsloth|bnb|quantized|"
    r"v\d+(\.\d+)?|\d{4}"
)  # of a name, which do not change the shape
STORED = re.compile(
    r"(mx|nv)?fp[48](a16)?|fp16|bf16|f16|awq|gptq|nf4|w4a16|w8a16|w8a8|int[48]|[48]-?bit|q\d_[a-z0-9_]+|iq\d_[a-z_]+",
    re.IGNORECASE,
)  # a format in a model's name


def config_path(model: str) -> Path:
    """The config.json at a path, or in the folder there."""
    return Path(model) / "config.json" if Path(model).is_dir() else Path(model)


def find_model(name: str) -> NamedModel | None:
    """What a model's name says: one of `public_shapes`, a hub id, a GGUF file; None for others.

    >>> find_model("Qwen/Qwen3-32B-FP8"), find_model("unsloth/Qwen3-8B-GGUF:Q4_K_M")
    (NamedModel(shape='qwen3-32b', weights='fp8'), NamedModel(shape='qwen3-8b', weights='q4_k_m'))
    """
    known, weights = [*public_shapes()], ""
    if name in known:
        return NamedModel(name)
    if config_path(name).is_file() and not name.endswith(".gguf"):
        return None
    text = re.sub(r"(-\d+-of-\d+)?\.gguf$", "", name.replace("\\", "/").rpartition("/")[2].lower())
    tokens = re.split(r"[-:/ .](?=[a-z])|[-:/ ]|(?<!q\d)_(?=i?q\d_|[a-z]{3,})", text)
    while tokens:
        if len(tokens) > 1 and tokens[0] in OWNERS and (shape := find_name("model", " ".join(tokens[1:]), known)):
            return NamedModel(shape, weights)
        if shape := find_name("model", " ".join(tokens), known):
            return NamedModel(shape, weights)
        last = tokens.pop()
        if STORED.fullmatch(last):
            weights = weights or last
        elif not ENDINGS.fullmatch(last):
            return None
    return None


def model_config(model: str | ModelConfig) -> ModelConfig:
    """The config.json of a model, as `find_architecture` takes it."""
    if isinstance(model, ModelConfig):
        return model
    if named := find_model(model):
        return public_shapes()[named.shape]
    path, known = config_path(model), [*public_shapes()]
    if not path.is_file() and path.suffix != ".json":
        return public_shapes()[known_name("model", model, known, other=OTHER_MODEL)]
    config = read_json(path, f"architecture {path}", missing=INVALID, invalid=INVALID)
    return ModelConfig.from_json(config, model)


def find_architecture(model: str | ModelConfig, name: str = "") -> Architecture:
    """The shape of a model.

    model : a name of `public_shapes`, also as a hub id such as "Qwen/Qwen3-32B-FP8"; a path to a config.json or its
        folder, or its content
    name : name of the model; default: as in `model`

    Raises InputError for a model that is not known, or of a kind whose passes are not.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("mixtral-8x7b").experts.per_token
    2
    """
    config = model_config(model)
    if drafter := drafter_config(config):
        shown = name or ("config.json" if isinstance(model, ModelConfig) else model)
        raise InputError(f"{shown} is a drafter's ({drafter.method}), not a model's; give it as --drafter")
    if isinstance(model, ModelConfig) or not (named := find_model(model)):
        return architecture_from_config(config, name)
    return _public(named.shape, name)


@cache
def _public(shape: str, name: str) -> Architecture:
    return architecture_from_config(public_shapes()[shape], name)
