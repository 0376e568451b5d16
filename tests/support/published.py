"""Small drafters as other libraries write them: names and shapes of tensors, config.json, and the tokens that the
library's own modules draft, with weights that tests generate from the tensors' names.

`python -m tests.support.published` writes LAYOUTS anew, in an environment with speculators 0.9.0, specforge 0.2.0 and
angelslim 0.5.0.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.split_targets import target_of
from tests.support.tiny import VOCAB

LAYOUTS = Path(__file__).parents[1] / "realrun/pairs/published_layouts.json"
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 160, "rms_norm_eps": 1e-5, "pad_token_id": 0,
}  # fmt: skip
DRAFTED = [2 * number + 1 for number in range(40)]  # tokens of a draft vocabulary
TEXT = [17, 3, 88, 41, 5, 60, 12, 33, 71, 9, 24, 52]
MASK, STEPS = 96, 3  # token; drafted tokens that are compared
AT = (2, 6, 10)  # places of pending tokens


def number_of(name: str, shape: list[int], dtype: str = "float64") -> torch.Tensor:
    """Generate a drafter's tensor from its name."""
    if name == "d2t":
        return torch.tensor(DRAFTED[: shape[0]]) - torch.arange(shape[0])
    if name == "t2d":
        return torch.isin(torch.arange(shape[0]), torch.tensor(DRAFTED))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "norm" in name and len(shape) == 1:
        return 1 + 0.2 * numbers
    return numbers if "markov_w" in name else 0.25 * numbers  # large enough to decide some tokens


def tensors_of(shapes: Mapping[str, list[int]], *, target_embedding: bool) -> dict[str, torch.Tensor]:
    tensors = {name: number_of(name, shape) for name, shape in shapes.items()}
    if target_embedding and "embed_tokens.weight" in tensors:
        tensors["embed_tokens.weight"] = target_of("llama").model.embed_tokens.weight.detach().clone()
    return tensors


def write(layout: Mapping[str, Any], folder: Path) -> Path:
    """Write the folder that the library wrote, in float64: files, config.json and tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(layout["config"]))
    tensors = tensors_of(layout["tensors"], target_embedding="eagle3" in layout["name"])
    for file, names in layout["files"].items():
        save_file({name: tensors[name].clone() for name in names}, folder / file)
    if len(layout["files"]) > 1:
        places = {name: file for file, names in layout["files"].items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def layouts() -> dict[str, Any]:
    return {layout["name"]: layout for layout in json.loads(LAYOUTS.read_text())}


@torch.inference_mode()
def target_states(layers: list[int]) -> torch.Tensor:
    """The target's states [T, k d] of TEXT after these numbers of layers, concatenated."""
    asked = {"use_cache": False, "output_hidden_states": True}
    states = target_of("llama").model(input_ids=torch.tensor([TEXT]), **asked).hidden_states
    return torch.cat([states[count][0] for count in layers], dim=-1)


def causal(rows: int) -> torch.Tensor:
    unseen = torch.ones(rows, rows, dtype=torch.bool).triu_(1)
    return torch.zeros(1, 1, rows, rows, dtype=torch.float64).masked_fill_(unseen, torch.finfo(torch.float64).min)


# What the libraries' modules draft, without a cache. `layer` runs their layers over rows [n, d].


def chain(
    model: Any, fused: torch.Tensor, layer: Callable[..., torch.Tensor], post_norm: bool, place: int
) -> list[int]:
    """EAGLE-3: rows read a token's embedding and the state before it; after the pending token, the drafter's own."""
    tokens, hidden, drafts = TEXT[1 : place + 1], fused[:place], list[int]()
    while True:
        out = layer(model.embed_tokens.weight[torch.tensor(tokens)], hidden)[-1:]
        drafts.append(DRAFTED[int(model.lm_head(model.norm(out)).argmax())])
        if len(drafts) == STEPS:
            return drafts
        tokens, hidden = [*tokens, drafts[-1]], torch.cat([hidden, model.norm(out) if post_norm else out])


def speculators_rows(model: Any, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(1, len(x) + 1)[None]
    places, out = model.rotary_emb(x[None], positions), x[None]
    for module in model.layers:
        out = module(out, attention_mask=causal(len(x)), position_ids=positions, position_embeddings=places)
    return out[0]


def speculators_fused(model: Any, layers: list[int]) -> torch.Tensor:
    states = target_states(layers)
    if model.input_norm is not None:
        states = model.input_norm(states)
    if model.fc_norm is not None:
        parts = zip(model.fc_norm, states.chunk(len(model.fc_norm), dim=-1), strict=True)
        states = torch.cat([norm(part) for norm, part in parts], dim=-1)
    return model.fc(states)


def speculators_eagle3(model: Any, config: Mapping[str, Any], place: int) -> list[int]:
    fused = speculators_fused(model, config["eagle_aux_hidden_state_layer_ids"])
    rows = lambda embedded, hidden: speculators_rows(model, torch.cat([embedded, hidden], dim=-1))  # noqa: E731
    return chain(model, fused, rows, bool(config["norm_output"]), place)


def speculators_peagle(model: Any, config: Mapping[str, Any], place: int) -> list[int]:
    fused = speculators_fused(model, config["eagle_aux_hidden_state_layer_ids"])[:place]
    masks = model.fc(model.mask_hidden[0]).expand(STEPS - 1, -1)
    tokens = torch.tensor([*TEXT[1 : place + 1], *[MASK] * (STEPS - 1)])
    out = speculators_rows(model, torch.cat([model.embed_tokens.weight[tokens], torch.cat([fused, masks])], dim=-1))
    return [DRAFTED[int(row.argmax())] for row in model.lm_head(model.norm(out[-STEPS:]))]


def any_dflash(model: Any, config: Mapping[str, Any], place: int) -> list[int]:
    """DFlash and DSpark of both libraries: a block's rows attend to the text and to each other."""
    own = config.get("dflash_config") or {}
    layers = config.get("aux_hidden_state_layer_ids") or [number + 1 for number in own["target_layer_ids"]]
    context = model.hidden_norm(model.fc(target_states(layers)[:place]))[None]
    target, size = target_of("llama"), config["block_size"]
    x = target.model.embed_tokens.weight[torch.tensor([TEXT[place], *[MASK] * (size - 1)])][None]
    positions = torch.arange(place + size)[None]
    places = model.rotary_emb(x, positions)
    for module in model.layers:
        x = module(hidden_states=x, target_hidden=context, attention_mask=None, position_embeddings=places)
    first = int(not config.get("sample_from_anchor"))
    states, few = model.norm(x)[0, first : first + STEPS], config.get("draft_vocab_size", VOCAB) < VOCAB
    logits = (model.lm_head if few else target.lm_head)(states)
    if (markov := getattr(model, "markov_head", None)) is None:
        return [DRAFTED[token] if few else token for token in logits.argmax(-1).tolist()]
    drafts = [TEXT[place]]
    for row, state in zip(logits, states, strict=True):
        previous, hidden = torch.tensor([drafts[-1:]]), state[None, None]
        if hasattr(markov, "block_bias"):  # speculators
            bias = markov.block_bias(prev_token_ids=previous, hidden_states=hidden)[0, 0]
        else:
            bias = markov.compute_step_bias(previous[0], hidden[0])[0]
        token = int((row + bias).argmax())
        drafts.append(DRAFTED[token] if few else token)
    return drafts[1:]


def specforge_eagle3(model: Any, config: Mapping[str, Any], place: int) -> list[int]:
    def rows(embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return model.backbone(embedded[None], hidden[None], None, causal(len(hidden)), torch.arange(len(hidden))[None])[
            0
        ]

    fused = model.project_hidden_states(target_states(config["eagle_aux_hidden_state_layer_ids"])[None])[0]
    return chain(model, fused, rows, post_norm=False, place=place)


def angelslim_eagle3(model: Any, config: Mapping[str, Any], place: int) -> list[int]:
    def rows(embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        mask, at = causal(len(hidden)), torch.arange(len(hidden))[None]
        return model.encode_layers(embedded[None], hidden[None], [[], []], mask, at, use_cache=True)[0][0]

    fused = model.combine_hidden_states(target_states(config["eagle_aux_hidden_state_layer_ids"])[None])[0]
    return chain(model, fused, rows, post_norm=False, place=place)


def libraries() -> Iterator[tuple[str, Any, Callable[..., list[int]] | None, dict[str, Any]]]:
    """Yield a layout's name, the library's module, the function that drafts with it, and `save_pretrained` settings."""
    from specforge.modeling.draft.dflash import DFlashDraftModel as ForgeDFlash  # type: ignore[import-not-found]
    from specforge.modeling.draft.domino import DominoDraftModel  # type: ignore[import-not-found]
    from specforge.modeling.draft.dspark import DSparkDraftModel as ForgeDSpark  # type: ignore[import-not-found]
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # type: ignore[import-not-found]
    from specforge.modeling.draft.peagle import PEagleDraftModel as ForgePEagle  # type: ignore[import-not-found]
    from speculators import SpeculatorsConfig, VerifierConfig  # type: ignore[import-not-found]
    from speculators.models.dflash import (  # type: ignore[import-not-found]
        DFlashDraftModel,
        DFlashSpeculatorConfig,
    )
    from speculators.models.dspark import (  # type: ignore[import-not-found]
        DSparkDraftModel,
        DSparkSpeculatorConfig,
    )
    from speculators.models.eagle3 import (  # type: ignore[import-not-found]
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )
    from speculators.models.peagle import (  # type: ignore[import-not-found]
        PEagleDraftModel,
        PEagleSpeculatorConfig,
    )
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # type: ignore[import-not-found]
    from transformers import LlamaConfig, Qwen3Config

    def layers(kind: Any, count: int) -> Any:
        config = kind(**SIZES, num_hidden_layers=count)
        config._attn_implementation = "eager"
        return config

    def common(algorithm: str, tokens: int, few: bool) -> dict[str, Any]:
        verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
        methods = [GreedyTokenProposalConfig(speculative_tokens=tokens)]
        made = SpeculatorsConfig(
            algorithm=algorithm, proposal_methods=methods, default_proposal_method="greedy", verifier=verifier
        )
        return {"speculators_config": made, "draft_vocab_size": len(DRAFTED) if few else VOCAB}

    def eagle3(kind: Any, count: int, states: list[int], **more: Any) -> Any:
        own = {"transformer_layer_config": layers(kind, count), "eagle_aux_hidden_state_layer_ids": states, **more}
        return Eagle3DraftModel(Eagle3SpeculatorConfig(**common("eagle3", 3, True), **own))

    yield "speculators-eagle3", eagle3(LlamaConfig, 1, [1, 2, 3]), speculators_eagle3, {}
    newer = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
    yield "speculators-eagle3.1", eagle3(LlamaConfig, 2, [0, 1, 2, 3], **newer), speculators_eagle3, {}
    shards = {"max_shard_size": "20KB"}
    yield (
        "speculators-eagle3-qwen3-sharded",
        eagle3(Qwen3Config, 1, [1, 2, 3], norm_before_fc=True),
        speculators_eagle3,
        shards,
    )
    own = {"transformer_layer_config": layers(LlamaConfig, 2), "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    peagle = PEagleDraftModel(PEagleSpeculatorConfig(**common("peagle", 4, True), **own, mask_token_id=MASK))
    yield "speculators-peagle", peagle, speculators_peagle, {}
    own = {"transformer_layer_config": layers(Qwen3Config, 2), "aux_hidden_state_layer_ids": [1, 3], "block_size": 6}
    for name, few in (("speculators-dflash", False), ("speculators-dflash-draft-vocabulary", True)):
        dflash = DFlashDraftModel(DFlashSpeculatorConfig(**common("dflash", 5, few), **own, mask_token_id=MASK))
        yield name, dflash, any_dflash, {}
    for name, few, head in (("", False, "vanilla"), ("-gated", True, "gated"), ("-rnn", False, "rnn")):
        rank = {"markov_rank": 4, "markov_head_type": head}
        dspark = DSparkSpeculatorConfig(**common("dspark", 6, few), **own, mask_token_id=MASK, **rank)
        yield f"speculators-dspark{name}", DSparkDraftModel(dspark), None if head == "rnn" else any_dflash, {}

    states = {"draft_vocab_size": len(DRAFTED), "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    made = LlamaConfig(**SIZES, num_hidden_layers=1, **states, architectures=["LlamaForCausalLMEagle3"])
    yield "specforge-eagle3", LlamaForCausalLMEagle3(made), specforge_eagle3, {}
    made = LlamaConfig(**SIZES, num_hidden_layers=1, **states, architectures=["LlamaForCausalLMEagle3"], fc_norm=True)
    yield "specforge-eagle3-norms", LlamaForCausalLMEagle3(made), specforge_eagle3, {}
    yield "specforge-peagle", ForgePEagle(LlamaConfig(**SIZES, num_hidden_layers=2, draft_vocab_size=40)), None, {}
    block = {"block_size": 6, "num_target_layers": 4}
    dflash_config = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
    for name, kind, more in (
        ("specforge-dflash", ForgeDFlash, {}),
        ("specforge-dspark", ForgeDSpark, {"markov_rank": 4}),
        ("specforge-domino", DominoDraftModel, {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 8}),
    ):
        made = layers(Qwen3Config, 2)
        made.update({**block, "dflash_config": {**dflash_config, **more}, "architectures": [kind.__name__]})
        yield name, kind(made), None if name == "specforge-domino" else any_dflash, {}

    from angelslim.compressor.speculative.train.models.draft.llama_eagle3 import (  # type: ignore[import-not-found]
        Eagle3LlamaForCausalLM,
    )

    made = LlamaConfig(**SIZES, num_hidden_layers=1, **states, architectures=["Eagle3LlamaForCausalLM"])
    yield "angelslim-eagle3", Eagle3LlamaForCausalLM(made), angelslim_eagle3, {}


@torch.inference_mode()
def main() -> None:
    written = []
    for name, model, drafts, how in libraries():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, **how)
            files = {
                file.name: [*safe_open(file, framework="pt").keys()] for file in sorted(Path(folder).glob("*.safet*rs"))
            }
            shapes = {key: [*t.shape] for file in files for key, t in load_file(Path(folder) / file).items()}
            config = json.loads((Path(folder) / "config.json").read_text())
        model = model.double().eval()
        numbers = tensors_of(shapes, target_embedding="eagle3" in name)
        lacking = model.load_state_dict(numbers, strict=False)
        assert not lacking.unexpected_keys, (name, lacking)
        known = {} if drafts is None else {place: drafts(model, config, place) for place in AT}
        written.append({"name": name, "config": config, "files": files, "tensors": shapes, "drafts": known})
    lines = ",\n".join(json.dumps(layout, sort_keys=True) for layout in written)
    LAYOUTS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
