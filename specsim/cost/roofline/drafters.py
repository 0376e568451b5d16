"""Published drafters, told from models by the architectures in their config.json."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.cost.roofline.config import ModelConfig

# What a drafter's class has in its name, and the drafter's name in engines; the first that fits counts.
CLASSES = {
    "dflash": "dflash", "dspark": "dspark", "domino": "domino", "peagle": "p-eagle", "eagle3": "eagle3",
    "medusa": "medusa", "mtp": "mtp", "assistant": "mtp", "eagle": "eagle",
}  # fmt: skip
ONE_PASS = ("dflash", "dspark", "domino", "p-eagle", "pard")  # draft all tokens in a single pass
"""Drafters of kind block, by the names that engines and papers give them."""
# model_type of models without layers for multi-token prediction: their code in transformers does not mention any.
WITHOUT_MTP = (
    "llama", "llama4_text", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2",
    "gemma3_text", "phi3", "gpt_oss", "smollm3", "minicpm3", "seed_oss",
)  # fmt: skip
LAYERS = "transformer_layer_config"  # where speculators has the sizes of a head's layers


@dataclass(frozen=True)
class DrafterConfig:
    """A published drafter's config.json.

    method : its name in engines, of `CLASSES`
    sizes : the keys of its layers' shape, as a dense decoder's config.json has them
    vocabulary : tokens that it can draft; 0: not stated
    block : longest draft that it was trained for; 0: not stated
    heads : of MEDUSA; 0: not stated
    """

    method: str
    sizes: ModelConfig
    vocabulary: int = 0
    block: int = 0
    heads: int = 0


def drafter_config(config: ModelConfig) -> DrafterConfig | None:
    """What a drafter's config.json says; None for a model's.

    >>> drafter_config(ModelConfig({"architectures": ["DFlashDraftModel"], "block_size": 16})).block
    15
    """
    architectures = config.get("architectures")
    classes = [*architectures] if isinstance(architectures, list) else []
    classes += [config.get("speculators_model_type"), config.get("model_type")]
    written = " ".join(str(name) for name in classes).lower().replace("_", "").replace("-", "")
    method = next((method for word, method in CLASSES.items() if word in written), None)
    if method is None:
        return None
    if method in ("eagle", "eagle3") and config.get("parallel_drafting"):
        method = "p-eagle"
    layers = config | config.inner(LAYERS)
    # A head's layers are dense, whatever the class is called; windows change little at the contexts that are drafted.
    sizes = {key: value for key, value in layers.items() if key not in ("text_config", "sliding_window", "layer_types")}
    numbers = {
        "vocabulary": config.get("draft_vocab_size") or layers.get("vocab_size"),
        "block": config.get("block_size"),
        "heads": config.get("medusa_num_heads") or config.get("num_heads"),
    }
    whole = {key: value for key, value in numbers.items() if type(value) is int and value > 0}
    if method == "dflash" and "block" in whole:
        whole["block"] -= 1  # the first token of its block is the last accepted token, not a drafted one
    return DrafterConfig(method, ModelConfig({**sizes, "model_type": "llama"}, config.name), **whole)


def lacks_mtp(config: ModelConfig) -> bool:
    """Whether a model's config.json says that it has no layers for multi-token prediction, or its family has none."""
    text = config | config.inner("text_config")
    stated = [text[key] for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if text.get(key) is not None]
    return not any(stated) if stated else text.get("model_type") in WITHOUT_MTP
