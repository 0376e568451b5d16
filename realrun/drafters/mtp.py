"""Multi-token prediction: the module that a target's own checkpoint ships for drafting (DeepSeek-V3, arXiv:2412.19437).

A projection [2 d -> d] joins the normed embedding of a token and the target's normed state of the token before it. A
layer like the target's follows, then a norm and the target's head. In a round that starts with token n pending, the
rows of tokens 1 .. n read the target's states, and the row of a drafted token reads the module's own output of the row
before it: with K > 1 the module runs again on its own output, as in vLLM and SGLang. The first token has no row because
no state precedes it.

transformers does not load these weights, so they are read from the checkpoint's safetensors. Families differ in names
and in the settings of `Layout`, which follow vLLM 0.32; `Layout` names the two in which SGLang differs.

References: vLLM's model_executor/models/deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py, qwen3_next_mtp.py and
qwen3_5_mtp.py. MiMo targets (Xiaomi), a Qwen2 model with MTP modules that transformers does not have either, are as in
its mimo.py.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.hub import cached_file

from realrun.drafters.eagle import EagleKind, EagleLM, RowsOfStates
from realrun.drafters.edd import EMBEDDING, HEAD, share_vocabulary
from realrun.drafters.kind import DrafterFacts, Origin
from realrun.drafters.state_drafter import StateDrafterLM
from realrun.lm.cached import FULL, CachedLM, has_recurrent_layers
from realrun.lm.layer_stack import PartsLM, model_parts
from realrun.lm.recurrent import RecurrentStates
from realrun.lm.split_target import SplitTarget
from specsim.io.errors import InputError


class MiMoConfig(Qwen2Config):
    """config.json of a MiMo checkpoint."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The target without its MTP modules, which `realrun.drafters.mtp` reads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"model\.mtp_layers\..*"]


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's tensors; engines load those
NORM, LAYER = "model.norm.weight", "model.layers.0."  # names in the one-layer model that runs the module
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# Settings that a configuration gives for every layer: values for one layer with experts, and for one without.
BY_LAYER: dict[str, tuple[Any, Any]] = {
    "layer_types": ([FULL], [FULL]),
    "mlp_layer_types": (["sparse"], ["dense"]),
    "mlp_only_layers": ([], [0]),
    "first_k_dense_replace": (0, 1),
    "decoder_sparse_step": (1, 1),
}


@dataclass(frozen=True)
class Layout:
    """The names of a family's MTP tensors in a checkpoint, and how the family runs its modules.

    module : pattern of the prefix of all tensors of module {k}, from 0; {layer} is the target's layer count plus k
    embedding_norm, state_norm, projection, norm : names after this prefix
    layer : prefix, after `module`, of the tensors of the module's decoder layer
    embedding_first : whether the projection's input is the embedding, then the state, or the other way round
    masks_first : whether the first row reads zeros in place of the embedding; in SGLang not for DeepSeek and GLM
    reads_normed : whether the target's states are read after its final norm
    hands_on_normed : whether the module's own output is read after its norm; in SGLang also for GLM
    """

    module: str
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str
    layer: str = ""
    embedding_first: bool = True
    masks_first: bool = True
    reads_normed: bool = True
    hands_on_normed: bool = True


DEEPSEEK = Layout(
    r"(?:.*\.)?layers\.{layer}\.", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"
)
LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), DEEPSEEK),
    "glm4_moe": replace(DEEPSEEK, hands_on_normed=False),
    MiMoConfig.model_type: Layout(
        r"model\.mtp_layers\.{k}\.", "token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight",
        "final_layernorm.weight", embedding_first=False, reads_normed=False,
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        Layout(
            r"mtp\.", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight",
            layer="layers.{k}.", masks_first=False,
        ),
    ),
}  # fmt: skip


def read_tensors(folder: Path, pattern: str) -> dict[str, torch.Tensor]:
    """Read the tensors whose names begin with a pattern from a checkpoint's safetensors, and drop that prefix."""
    index = folder / INDEX
    files = {*json.loads(index.read_text())["weight_map"].values()} if index.is_file() else {WEIGHTS}
    tensors = {}
    for file in sorted(files):
        if not (folder / file).is_file():
            continue
        with safe_open(folder / file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                if found := re.match(pattern, name):
                    tensors[name[found.end() :]] = handle.get_tensor(name)
    return tensors


def layer_model(target: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Make a one-layer model of the target's class from the module's tensors and the target's embedding and head.

    Raises InputError unless the tensors are exactly those of the layer and the norm.
    """
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    plain = not any(".experts." in name for name in tensors)
    for key, values in BY_LAYER.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, values[plain])
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    shared = {EMBEDDING: target.get_input_embeddings().weight, HEAD: target.get_output_embeddings().weight}
    if getattr(config, "tie_word_embeddings", False):
        del shared[HEAD]
    experts = {"experts_implementation": found} if (found := config._experts_implementation) else {}
    try:
        with torch.random.fork_rng([]):
            model, report = type(target).from_pretrained(
                None, config=config, state_dict={**shared, **tensors}, dtype=target.dtype, output_loading_info=True,
                attn_implementation=config._attn_implementation, **experts,
            )  # fmt: skip
    except RuntimeError as error:
        raise InputError(_does_not_fit(target, str(error).strip().splitlines()[0])) from None
    wrong = [f"{key.split('_')[0]} {name}" for key, names in report.items() for name in sorted(map(str, names))]
    if wrong:
        raise InputError(_does_not_fit(target, ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")))
    model = model.to(target.device).eval()
    share_vocabulary(model, target)
    return model


def _does_not_fit(target: Any, reason: str) -> str:
    return f"the MTP module in {target.name_or_path} does not fit its target ({reason}); download it again"


class Mtp(torch.nn.Module):
    """The MTP module of a target's checkpoint.

    tensors : of the module, with the names that follow `Layout.module`
    modules : number of modules in the checkpoint; only the first drafts, as in vLLM
    """

    def __init__(self, target: Any, layout: Layout, tensors: Mapping[str, torch.Tensor], modules: int = 1):
        super().__init__()
        own = {name: tensor for name, tensor in tensors.items() if name not in COPIES}
        parts = [layout.embedding_norm, layout.state_norm, layout.projection, layout.norm]
        if lacking := [name for name in parts if name not in own]:
            raise InputError(_does_not_fit(target, f"missing {', '.join(lacking)}"))
        embedding_norm, state_norm, projection, norm = (own.pop(name) for name in parts)
        below = layout.layer.format(k=0)
        if surplus := [name for name in own if not name.startswith(layout.layer.partition("{")[0])]:
            raise InputError(_does_not_fit(target, f"unexpected {', '.join(surplus)}"))
        layer = {name.removeprefix(below): value for name, value in own.items() if name.startswith(below)}
        self.layout, self.modules_shipped = layout, modules
        self.model = layer_model(target, {NORM: norm, **{LAYER + name: value for name, value in layer.items()}})
        inner = self.model.model
        self.embedding_norm, self.state_norm = copy.deepcopy(inner.norm), copy.deepcopy(inner.norm)
        size = int(target.config.hidden_size)
        self.projection = torch.nn.Linear(2 * size, size, bias=False, device=target.device, dtype=target.dtype)
        for module, weight in (
            (self.embedding_norm, embedding_norm), (self.state_norm, state_norm), (self.projection, projection),
        ):  # fmt: skip
            if weight.shape != module.weight.shape:
                raise InputError(_does_not_fit(target, f"sizes {[*weight.shape]} and {[*module.weight.shape]}"))
            module.weight = torch.nn.Parameter(weight.to(target.device, target.dtype), requires_grad=False)

    def fused(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Compute the layer's input [..., d] from tokens' embeddings and the states before them, [..., d] each."""
        normed = [self.embedding_norm(embedded), self.state_norm(features)]
        joined: torch.Tensor = self.projection(torch.cat(normed if self.layout.embedding_first else normed[::-1], -1))
        return joined


class MtpLM(RowsOfStates, EagleLM):
    """The module's pass over a target that keeps its last states."""

    def __init__(self, target: Any, mtp: Mtp):
        model = mtp.model
        self.eagle, self.norm, self.head = mtp, model.model.norm, model.get_output_embeddings()
        StateDrafterLM.__init__(self, target, model, model_parts(model), model.model.layers)

    def _embedded(self, tokens: Sequence[int], states: Sequence[int | None]) -> torch.Tensor:
        embedded = super()._embedded(tokens, states)
        if not self.eagle.layout.masks_first:
            return embedded
        first = torch.tensor([state == 0 for state in states], device=self.device)
        return embedded.masked_fill(first[:, None], 0)

    def handed_on(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts.normed(x, self.norm) if self.eagle.layout.hands_on_normed else x

    def _features_of(self, states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.target.norm(states) if self.eagle.layout.reads_normed else states
        return normed

    def finish(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        return PartsLM.finish(self, x, keep)


@dataclass(frozen=True, eq=False)
class MtpKind(EagleKind):
    """The MTP module that ships in the target's checkpoint."""

    name: ClassVar[str] = "mtp"
    origin: ClassVar[Origin] = "target"
    paper_policy: ClassVar[str | None] = None
    static: ClassVar[bool] = False

    @classmethod
    def check_target(cls, target: Any) -> None:
        if not has_recurrent_layers(target.config):
            super().check_target(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        """Read the target's own module; `tensors` and `facts` are empty."""
        config = target.config.get_text_config()
        layout = LAYOUTS.get(config.model_type)
        if layout is None:
            raise InputError(
                f"MTP modules of {config.model_type} targets are not read, only those of {', '.join(LAYOUTS)}; give "
                "another --drafter"
            )
        cls.check_target(target)
        folder = Path(cached_file(target.name_or_path, "config.json") or "").parent  # that the target was loaded from
        modules = list[dict[str, torch.Tensor]]()
        layers = int(config.num_hidden_layers)
        while found := read_tensors(folder, layout.module.format(k=len(modules), layer=layers + len(modules))):
            modules.append(found)
            if layout.layer:  # one prefix holds the layers of all modules
                break
        if not modules:
            raise InputError(f"{target.name_or_path} ships no MTP module; give another checkpoint or another --drafter")
        return target, cls(Mtp(target, layout, modules[0], len(modules)).eval())

    @property
    def facts(self) -> DrafterFacts:
        return {"modules": self.eagle.modules_shipped}

    def make_passes(self, target: Any) -> tuple[Any, CachedLM]:
        recurrent = has_recurrent_layers(target.config)
        whole = RecurrentStates(target) if recurrent else SplitTarget(target, *self.splits(target))
        return whole, MtpLM(whole, self.eagle)
